"""The workers of a pool on a Ray cluster. The modules of this package can be imported only if Ray is installed."""

import os

_PREFIX = r"\[rank \d+\] "  # matches the start of each line that a worker prints if ``prefix_output`` is True
_OPTION = "RAY_DEDUP_LOGS_ALLOW_REGEX"

# If several processes print the same line, Ray shows it once. Lines that differ only in digits count as the same, so
# most lines with a rank as prefix would be missing. The environment variable `_OPTION` exempts lines that match a
# regular expression. Ray reads the variable only when Ray is imported, so the environment is restored after
# the import.
_is_ours = _OPTION not in os.environ
os.environ.setdefault(_OPTION, _PREFIX)
try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError('engine="ray" needs Ray: pip install "nn_parallel[ray]"') from error
finally:
    if _is_ours:
        del os.environ[_OPTION]
