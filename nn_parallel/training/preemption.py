"""`stop_requested`: a signal to one process, and all ranks stop at the same step."""

from __future__ import annotations

from .._engine.ranks.blocks import blocks_of
from .._engine.ranks.membership import join_launched_world
from .._engine.ranks.stop_signals import is_asked, is_reached, listen


def stop_requested() -> bool:
    """Return whether this job has been asked to stop: the same on all ranks, at the same step. Every rank calls it.

    It is asked by SIGTERM, SIGUSR1 or SIGUSR2, to one rank or to all: by SLURM when a job is preempted, and before its
    time limit with ``--signal=USR1@120``; by a cloud that takes a machine back; by torchrun, when it is ended itself.
    From the first call on these signals do not end the process any more, however many come. A handler that the program
    has set is called too. In the script that made a pool, one call before `ParallelExecutor.run` has the ranks of the
    pool asked as well, by a signal to the script.

    SLURM sends the signals to every process of a job. The workers of prepared loaders ignore them, so that the rank can
    go on to the next step; other forks of this process ignore SIGUSR1 and SIGUSR2.

    Costs one round trip to the store, no collective.

    Raises:
        ParallelError: the first call is not in the main thread, where alone Python handles signals; or it is inside the
            body of a function of some ranks.

    Example::

        for x, y in loader:
            train_step(x, y)
            if stop_requested():
                save_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader)
                sys.exit(os.EX_TEMPFAIL)  # 75: start this again
    """
    listen()
    blocks = blocks_of(join_launched_world())
    return is_asked() if blocks is None else is_reached(blocks)
