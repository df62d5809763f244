# The metadata are in pyproject.toml. This file is for tools that look for it.
from setuptools import setup

setup()
