"""The pool: worker processes, and the calls of `ParallelExecutor`."""
