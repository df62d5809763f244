"""The implementation of `ParallelExecutor`: worker processes, and its calls on them or on the ranks of a launcher."""
