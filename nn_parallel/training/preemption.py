"""`stop_requested`: after a signal to one process, all ranks stop at the same step."""

from __future__ import annotations

from .._engine.ranks.blocks import blocks_of
from .._engine.ranks.membership import join_launched_world
from .._engine.ranks.stop_signals import is_asked, is_reached, listen


def stop_requested() -> bool:
    """Return whether this job has been asked to stop. Every rank calls this function, for instance after each step.

    The answer becomes True on all ranks at the same call, so that they can save a checkpoint together.

    SIGTERM, SIGUSR1 or SIGUSR2 asks the job to stop, if one or more ranks receive it. SLURM sends such a signal when it
    preempts a job, and before the time limit with ``--signal=USR1@120``. A cloud provider sends such a signal when it
    takes a machine back, and torchrun sends it when torchrun itself is ended. After the first call of this function,
    these signals no longer end the process, however many arrive. If the program has set a handler of its own, that
    handler is called too.

    In the script that made a pool, call this function once before `ParallelExecutor.run`: a signal to the script then
    asks the ranks of the pool to stop.

    SLURM sends the signals to every process of a job. The workers of prepared loaders ignore the signals, so that the
    rank can go on to its next step. Other processes that this process forks ignore SIGUSR1 and SIGUSR2.

    A call costs one round trip to the store, and no collective.

    Raises:
        ParallelError: the first call is not in the main thread, but Python handles signals only in the main thread; or
            a call is inside the body of a function that only some ranks run.

    Example::

        for x, y in loader:
            train_step(x, y)
            if stop_requested():
                save_checkpoint("last.pt", model=model, optimizer=optimizer, loader=loader)
                sys.exit(os.EX_TEMPFAIL)  # the exit status 75 means: start the job again
    """
    listen()
    blocks = blocks_of(join_launched_world())
    return is_asked() if blocks is None else is_reached(blocks)
