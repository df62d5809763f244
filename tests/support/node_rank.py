"""What a rank does on a node of the laboratory: ``node_rank.py FOLDER block|loop`` adds numbers up until it is told.

It writes who it is into FOLDER, and what came of it. With a file ``end`` there all ranks leave at the same step, with a
file ``raise`` the last one raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nn_parallel import ParallelExecutor, initialize_ddp

TIMEOUT_S, LOST_AFTER_S = 12.0, 4.0  # of collectives; of nodes: a third of that


def add_up(folder: Path) -> int:
    """How many steps were made."""
    here, steps = initialize_ddp(), 0
    is_last = here.rank == here.world_size - 1
    while True:
        values = torch.tensor([here.rank + 1.0, float(here.is_main and (folder / "end").exists())])
        dist.all_reduce(values)
        assert values[0] == sum(range(here.world_size + 1))
        steps += 1
        if values[1]:
            return steps
        if is_last and (folder / "raise").exists():
            raise ValueError("a bad batch")
        time.sleep(0.01)  # a step of training


def write_whole(path: Path, text: str) -> None:
    """Who waits for the file finds all of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def main(folder: Path, how: str) -> None:
    here = initialize_ddp(timeout=TIMEOUT_S)
    dist.all_reduce(torch.ones(1))
    sys.stderr = (folder / f"{here.rank}.stderr").open("w")
    write_whole(folder / f"{here.rank}.ready", str(os.getpid()))
    outcome = {"node": here.node_rank, "error": "", "told": ""}
    try:
        with ParallelExecutor() if how == "block" else contextlib.nullcontext():
            add_up(folder)
    except BaseException as error:
        outcome |= {"error": type(error).__name__, "told": str(error)}
        sys.excepthook(type(error), error, error.__traceback__)  # before the file below says that all is told
        sys.exit(1)
    finally:
        write_whole(folder / f"{here.rank}.json", json.dumps(outcome | {"at": time.time()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
