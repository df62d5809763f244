"""The workers of a pool on a Ray cluster. Importing a module of this room needs Ray."""

import os

_PREFIX = r"\[rank \d+\] "  # as `ParallelExecutor(prefix_output=True)` writes it
_OPTION = "RAY_DEDUP_LOGS_ALLOW_REGEX"

# Ray shows a line that several processes print once, and takes lines that differ in digits for the same. Then those of
# most ranks would be missing. It reads the option when it is imported; afterwards the environment is as it was.
_is_ours = _OPTION not in os.environ
os.environ.setdefault(_OPTION, _PREFIX)
try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError('engine="ray" needs Ray: pip install "nn_parallel[ray]"') from error
finally:
    if _is_ours:
        del os.environ[_OPTION]
