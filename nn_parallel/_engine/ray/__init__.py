"""The workers of a pool on a Ray cluster. Importing a module of this room needs Ray."""

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError('engine="ray" needs Ray: pip install "nn_parallel[ray]"') from error
