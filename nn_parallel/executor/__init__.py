"""`ParallelExecutor`, one file per process role: executor and supervisor (parent), forkserver, worker, transport."""

from .executor import ParallelExecutor

__all__ = ["ParallelExecutor"]
