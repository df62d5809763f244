"""The version of the package. Only this file states it."""

__version__ = "0.1.0"
