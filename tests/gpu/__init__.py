"""For a machine with a GPU: see conftest.py."""
