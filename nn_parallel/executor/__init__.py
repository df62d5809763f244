"""`ParallelExecutor`, one file per process role: executor and supervisor (parent), forkserver, worker, connection."""

from .executor import ParallelExecutor

__all__ = ["ParallelExecutor"]
