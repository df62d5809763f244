"""The implementation of `ParallelExecutor`, which makes calls on worker processes or on the ranks of a launcher."""
