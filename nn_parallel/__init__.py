"""Run functions on every device and every rank.

If one rank fails in code that all ranks run together, every rank raises an exception.

The public names are functions, decorators, context managers and a few classes. Each file in this folder, and in
`training`, defines and documents some of them:

    ddp, ranks               the world of this process; code that only one rank runs, or that one rank runs first
    executor, data_parallel  functions on every device, in worker processes or in threads
    devices, gpus, doctor    the devices that exist; a check of all parts that distributed training needs
    training                 the model, the data and the checkpoints of an existing training loop
    errors, world, testing   the exceptions; the class `World`; tests that run on several ranks

The implementation is in `nn_parallel._engine`, whose docstring maps its files. Importing the package starts no process
and no thread.
"""

import torch  # noqa: F401  # imported before `paused()`, so that the garbage of this large import is still collected

from ._engine import garbage_collection

with garbage_collection.paused():
    from ._version import __version__ as __version__
    from .data_parallel import parallel_on_all_devices
    from .ddp import cleanup_ddp, current_world, initialize_ddp, should_use_distributed
    from .devices import resolve_device
    from .doctor import Report, verify_ddp_setup
    from .errors import (
        ExecutorClosedError,
        LaunchError,
        ParallelError,
        RankError,
        RankTimeoutError,
        RemoteError,
        TransferError,
        WorkerDiedError,
    )
    from .executor import ParallelExecutor, parallelize_on_gpus
    from .gpus import GPU, list_gpus, parse_gpu_selection, select_gpus
    from .ranks import barrier, broadcast, on_local_rank, on_rank, rank_first
    from .training.batch_size import find_batch_size
    from .training.checkpoint import load_checkpoint, save_checkpoint
    from .training.collectives import all_gather_object, all_gather_tensor, all_ranks, any_rank, reduce_metrics
    from .training.data import prepare_dataloader
    from .training.logs import setup_logging
    from .training.model import (
        accumulate,
        average_parameters,
        prepare_model,
        seed_everything,
        sync_buffers,
        unwrap_model,
    )
    from .training.preemption import stop_requested
    from .training.profiling import profile_ranks
    from .world import World

__all__ = [
    "GPU",
    "ExecutorClosedError",
    "LaunchError",
    "ParallelError",
    "ParallelExecutor",
    "RankError",
    "RankTimeoutError",
    "RemoteError",
    "Report",
    "TransferError",
    "WorkerDiedError",
    "World",
    "accumulate",
    "all_gather_object",
    "all_gather_tensor",
    "all_ranks",
    "any_rank",
    "average_parameters",
    "barrier",
    "broadcast",
    "cleanup_ddp",
    "current_world",
    "find_batch_size",
    "initialize_ddp",
    "list_gpus",
    "load_checkpoint",
    "on_local_rank",
    "on_rank",
    "parallel_on_all_devices",
    "parallelize_on_gpus",
    "parse_gpu_selection",
    "prepare_dataloader",
    "prepare_model",
    "profile_ranks",
    "rank_first",
    "reduce_metrics",
    "resolve_device",
    "save_checkpoint",
    "seed_everything",
    "select_gpus",
    "setup_logging",
    "should_use_distributed",
    "stop_requested",
    "sync_buffers",
    "unwrap_model",
    "verify_ddp_setup",
]
