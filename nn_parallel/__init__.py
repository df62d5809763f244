"""Run functions on every device and every rank, with an exception where others hang.

The files, from the bottom up; each knows only those before it in this list::

    _version, errors, collector the version; every error; Python's garbage collector
    devices, gpus               which devices there are; what NVML tells of GPUs
    pickle_diagnostics          which part of an object cannot be pickled
    pickling                    objects to bytes and back
    descendants, stack_dump     the processes that one has started; where those of a job stand, as another one sees it
    signals, polling            what is raised in the main thread from outside; looking for something again and again
    world                       who a process is among the ranks
    launch                      how the ranks are started, find each other, are connected, and know who is dead:
        environment, platforms  launcher's variables -> launch facts; who starts ranks and tells them nothing
        sockets, store          connections of this process; all that ranks tell each other, and by which keys
        flight_recorder         the collectives that this process has entered, as torch records them
        nccl                    what NCCL needs, so that a rank outlives a failure
        group, context          the process group of a world; the place of this process in it
        liveness, rendezvous    who is dead; the ranks find each other
    calls                       what ranks do together, and how a failure reaches all of them:
        records, outcomes       what they tell each other; how calls and blocks ended, and who decides that
        stacks, deadlock        where the main thread stands; whether a collective can still end
        watcher                 frees this rank from what cannot end
        calls, blocks           one rank runs, the others wait for it; all ranks run
        uncaught                an exception that ends a rank is shown by those that fail with it
    ddp                         initialize_ddp, cleanup_ddp
    exchange                    objects from rank to rank
    on_rank, preemption         code for one rank; a signal, and all ranks stop at the same step
    training                    an existing loop on every rank:
        collectives             reduce_metrics, any_rank, all_gather_object, ...
        random_numbers          those of this process, and others beside them
        model, logs             the model and the log lines of each rank
        to_device               a batch moved to a device
        draws, shares           whether ranks draw alike; which samples are those of one rank
        loader_workers, data    signals in the workers of a loader; loaders that hand the samples out
        batch_size              the largest batch that fits
        shards, checkpoint_file the sharded tensors of a checkpoint; its file
        states                  what of them is stored in a checkpoint, and how it is loaded
        saving                  checkpoints that are written while training goes on
        checkpoint, profiling   save_checkpoint, load_checkpoint; profile_ranks
    progress                    the bar of a map
    executor                    ParallelExecutor:
        memfd, connection       memory files for what is large; messages
        namespaces              what functions and classes that travel by value find in a worker
        evidence                why a process died
        headers, worker         what a worker is told of a task; a worker process
        fingerprints, modules   whether a function is still the same, and the modules that workers import
        names, script           what functions refer to by names, and when that is sent
        function_cache, packing the functions that workers keep; what is sent in all
        forkserver, boot        the process that forks workers; its first lines
        forkserver_client       that process as the parent sees it
        bars, output, tasks     what workers draw and print; what a pool is asked to do
        process, poller         one worker process as the parent sees it; waiting for many
        processes               those of a pool
        pool_store, pool        the store of the ranks of a run; which task goes where, and the supervisor's thread
        ray_messages, ray_node  what the script and the nodes of a Ray cluster send each other; one of these nodes
        ray_cluster, ray_pool   room on that cluster; the pool there
        started, launched       the executor's calls on a pool's workers; on the ranks that a launcher has started
        executor                the class itself
    shared_pool, data_parallel  parallelize_on_gpus; parallel_on_all_devices
    doctor                      verify_ddp_setup
    testing                     tests that run on several ranks, for pytest
    __main__                    the command line

Importing it starts nothing: no process, no thread, no GPU.
"""

import torch  # noqa: F401  # first: what its import leaves behind is collected on the way

from ._engine import garbage_collection as collector

with collector.paused():
    from ._engine.data_parallel import parallel_on_all_devices
    from ._engine.devices import resolve_device
    from ._engine.gpus import GPU, list_gpus, parse_gpu_selection, select_gpus
    from ._engine.ranks.context import current_world
    from ._engine.ranks.membership import cleanup_ddp, initialize_ddp, should_use_distributed
    from ._engine.ranks.stop_signals import stop_requested
    from ._version import __version__ as __version__
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
    from .executor import ParallelExecutor
    from .ranks import barrier, broadcast, on_local_rank, on_rank, rank_first
    from .shared_pool import parallelize_on_gpus
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
