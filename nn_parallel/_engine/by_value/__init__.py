"""Functions, classes and globals of a script, as they reach a worker."""
