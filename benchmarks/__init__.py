"""Figures beside their references, measured in one run: ``python -m benchmarks``."""
