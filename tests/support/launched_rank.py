"""What a rank does under a real launcher: ``launched_rank.py FOLDER SCENARIO`` writes what it saw into FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nn_parallel import ParallelExecutor, RankError, initialize_ddp, on_local_rank, on_rank

ARGUMENTS = [each for each in sys.argv[1:] if not each.startswith("--local-rank")]  # torch.distributed.launch adds it
FOLDER = Path(ARGUMENTS[0])


def world(**arguments: Any) -> dict[str, Any]:
    """Everything works: collectives, `on_rank`, `on_local_rank`, an executor, and an error that all ranks catch."""
    here = initialize_ddp(timeout=60, **arguments)
    total = torch.ones(1)
    dist.all_reduce(total)
    (FOLDER / f"{here.rank}.node").write_text("")
    on_local_rank(0, wait=True)(lambda: (FOLDER / f"{here.rank}.first_of_node").write_text(""))()
    with ParallelExecutor() as ex:
        ranks = ex.run(lambda: here.rank)
        mapped = list(ex.map(lambda x: x * 10, range(5)))
    return {
        "place": [here.rank, here.world_size, here.local_rank, here.local_world_size, here.node_rank],
        "launcher": here.launcher,
        "device": str(here.device),
        "sum": total.item(),
        "broadcast": on_rank(0, broadcast=True)(lambda: f"from rank {here.rank}")(),
        "ranks": ranks,
        "mapped": mapped,
        "failure": failure(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def failure() -> dict[str, Any]:
    """The last rank raises while the others sit in a collective, and all go on after that."""
    here = initialize_ddp(timeout=60)
    began = time.monotonic()
    try:
        with ParallelExecutor():
            if here.rank == here.world_size - 1:
                raise ValueError("a bad batch")
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
    except RankError as error:
        told, cause, seconds = str(error), error.rank, time.monotonic() - began
    initialize_ddp()
    total = torch.ones(1)
    dist.all_reduce(total)
    return {"told": told, "cause": cause, "seconds": seconds, "sum_after": total.item()}


def resume(dies: str = "") -> dict[str, Any]:
    """Train three steps from the last checkpoint on; one rank ``dies`` in its first life, after the second step."""
    here = initialize_ddp(timeout=60)
    path = FOLDER / "checkpoint.pt"
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    begin = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        begin = state["step"]
    steps = []
    for step in range(begin, 3):
        model(torch.full((1, 2), float(step + here.rank))).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        steps.append(step)
        on_rank(0, barrier=True)(lambda: torch.save({"model": model.state_dict(), "step": step + 1}, path))()  # noqa: B023
        if dies and step == 1 and here.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    return {
        "steps": steps,
        "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "weights": model.module.weight.tolist(),
    }


def main() -> None:
    scenario, *arguments = ARGUMENTS[1:]
    scenarios = {"world": world, "failure": failure, "resume": resume}
    seen = scenarios[scenario](*arguments)
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("OMPI_COMM_WORLD_RANK")
    unfinished = FOLDER / f"{rank or os.environ['PMI_RANK']}.unfinished"
    unfinished.write_text(json.dumps(seen))
    unfinished.rename(unfinished.with_suffix(".json"))


if __name__ == "__main__":
    main()
