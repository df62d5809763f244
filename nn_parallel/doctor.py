"""`verify_ddp_setup`: try each part that distributed training needs, and report how to repair the parts that fail.

Each check returns a `Finding`. Under a launcher, the launcher's ranks form a world and run a collective. Without a
launcher, the workers of a pool do this.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ._engine.devices import accelerators, device_properties
from ._engine.ranks.context import rank_context
from ._engine.ranks.environment import detect_launch
from ._version import __version__
from .ddp import initialize_ddp
from .errors import LaunchError, ParallelError
from .executor import ParallelExecutor
from .gpus import list_gpus

TIMEOUT_S = 60.0
OK = "ok"
WARNING = "warning"
FAILED = "failed"
WAITS = "..."  # the status that is shown while a check waits for other ranks, before its result is known
PART_WIDTH = 14
MARGIN = " " * (PART_WIDTH + 10)
TENSOR_BYTES = 16 << 20
OLDEST_TORCH = 2, 11


class Finding(NamedTuple):
    """The result of the check of one part of the setup, for instance of the devices."""

    status: str
    part: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        """Return the finding as lines of text. The last line gives the advice, if there is any."""
        first, *more = self.text.splitlines() or [""]
        if self.advice:
            more.append(f"-> {self.advice}")
        return "\n".join([f"{self.status:<8} {self.part:<{PART_WIDTH}} {first}", *(MARGIN + line for line in more)])


class Report(NamedTuple):
    """The findings of `verify_ddp_setup`. A report is true if no check has failed, and is printed as a table."""

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.status != FAILED for finding in self.findings)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.findings))


def verify_ddp_setup() -> Report:
    """Try what distributed training needs: the launch, the software, the devices, a rendezvous and a collective.

    Under a launcher, every rank calls the function, and all ranks get the same report. Without a launcher, the function
    starts workers of a pool, which talk to each other as ranks. A check that hangs counts as failed after a minute.

    Example::

        report = verify_ddp_setup()
        print(report)  # a line for each part: ok, warning or failed, and what to do
        assert report
    """
    return examine(lambda finding: None)


def examine(show: Callable[[Finding], None]) -> Report:
    """Try each part that distributed training needs, and show each finding as soon as it is known.

    `verify_ddp_setup` and the command ``nn-parallel doctor`` call this function.

    Args:
        show: a function that is called with each finding. Before a check that may wait for other ranks, ``show`` is
            also called with a finding of status `WAITS`, so that the user sees the reason for the wait. These findings
            are not in the report.
    """
    own = list[Finding]()

    def add(*findings: Finding) -> bool:
        for finding in findings:
            own.append(finding)
            show(finding)
        return own[-1].status != FAILED

    # Stop if one of these checks fails, because the later checks need a valid launch and a supported version of torch.
    if not add(_launch()) or not add(_software()):
        return Report(tuple(own))
    context = rank_context()
    is_launched = detect_launch(os.environ) is not None if context is None else context.open_store is not None
    add(_devices())
    if is_launched:
        return Report(tuple(_of_all_ranks(own, show)))
    add(*_of_workers("all" if accelerators() else "cpu"))
    return Report(tuple(own))


def _launch() -> Finding:
    try:
        launch = detect_launch(os.environ)
    except LaunchError as error:
        return Finding(FAILED, "launch", str(error))
    if launch is None:
        return Finding(OK, "launch", "no launcher: this process is alone, and executors in it start their own workers")
    place = f"rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank} of {launch.local_world_size}"
    text = f"by {launch.launcher}: {place}, on node {launch.node_rank}\n(from {', '.join(launch.told_by)})"
    return Finding(OK, "launch", text)


def _software() -> Finding:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"nn_parallel {__version__}"]
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if torch.cuda.is_available() and dist.is_nccl_available():
        parts.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    is_old = _number(torch.__version__) < OLDEST_TORCH
    advice = f"install torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}" if is_old else ""
    return Finding(FAILED if is_old else OK, "software", ", ".join(parts), advice)


def _devices() -> Finding:
    available = accelerators()
    gpus = [gpu for gpu in list_gpus() if gpu.is_visible]
    if len(gpus) == len(available):
        names = [gpu.name or "unnamed" for gpu in gpus]  # from NVML, because asking CUDA for a name initializes CUDA
    else:
        names = [getattr(device_properties(device), "name", "unnamed") for device in available]
    text = ", ".join(f"{device} ({name})" for device, name in zip(available, names, strict=True)) or "the CPU alone"
    if shown := os.environ.get("CUDA_VISIBLE_DEVICES"):
        text += f", with CUDA_VISIBLE_DEVICES={shown}"
    nvml_count = len(gpus) if torch.version.hip is None else 0
    if nvml_count > len(available):
        why = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA does not start"
        advice = "install a build of torch that fits the driver (see pytorch.org)"
        return Finding(WARNING, "devices", f"{text}; NVML sees {nvml_count} GPUs, but {why}", advice)
    return Finding(OK, "devices", text)


def _of_all_ranks(own: list[Finding], show: Callable[[Finding], None]) -> list[Finding]:
    """Make the checks that need all ranks, and return the findings of all ranks. Every rank calls this function.

    The findings of rank 0 come first. Findings of the other ranks that are `OK` are left out.

    Args:
        own: the findings of this rank so far.
        show: the argument of `examine`.
    """
    begun = time.perf_counter()
    launch = detect_launch(os.environ)
    if launch is not None and rank_context() is None:
        where = f"{launch.world_size} ranks at {launch.master_addr}:{launch.master_port}"
        show(Finding(WAITS, "rendezvous", f"for {where}, up to {TIMEOUT_S:g} s"))
    try:
        world = initialize_ddp(TIMEOUT_S)
        rendezvous = Finding(OK, "rendezvous", f"{world.world_size} ranks in {_milliseconds_since(begun)}")
        show(rendezvous)
        show(Finding(WAITS, "collective", f"of all ranks, up to {TIMEOUT_S:g} s"))
        with ParallelExecutor(timeout=TIMEOUT_S) as ex:
            first, *others = ex.run(lambda: [*own, rendezvous, _all_reduce()])
    except ParallelError as error:
        failed = Finding(FAILED, "ranks", str(error))
        show(failed)
        return [*own, failed]
    problems = [
        finding._replace(part=f"{finding.part} (rank {rank})")
        for rank, findings in enumerate(others, start=1)
        for finding in findings
        if finding.status != OK
    ]
    for finding in (*first[len(own) + 1 :], *problems):
        show(finding)
    return [*first, *problems]


def _of_workers(devices: str) -> list[Finding]:
    """Start workers on ``devices`` (two on the CPU), and return findings about their start and a collective."""
    begun = time.perf_counter()
    try:
        with ParallelExecutor(devices=devices, num_workers=2 if devices == "cpu" else None, timeout=TIMEOUT_S) as ex:
            world_size = len(ex.run(os.getpid))
            start = Finding(OK, "workers", f"{world_size} on {devices}, started in {_milliseconds_since(begun)}")
            return [start, ex.run(_all_reduce)[0]]
    except ParallelError as error:
        return [Finding(FAILED, f"workers on {devices}", str(error))]


def _all_reduce() -> Finding:
    """Add up a tensor over all ranks, on the device of this rank, and report the speed. Every rank calls this."""
    _, _, _, world_size, device = initialize_ddp()
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))  # for instance cpu:gloo,cuda:nccl
    part = f"{backends[device.type]} on {device.type}"
    ones = torch.ones(TENSOR_BYTES // 4, device=device)
    dist.all_reduce(ones)  # not timed, because the first collective also opens the connections
    correct = bool((ones == world_size).all())
    begun = time.perf_counter()
    dist.all_reduce(ones)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - begun
    rate = TENSOR_BYTES / seconds / 1e9
    text = f"all_reduce of {TENSOR_BYTES >> 20} MiB among {world_size} ranks in {seconds * 1e3:.1f} ms, {rate:.2g} GB/s"
    if not correct:
        return Finding(FAILED, part, f"{text}, and the sum is wrong", "try NCCL_P2P_DISABLE=1, and report the error")
    return Finding(OK, part, text)


def _number(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version, so that versions can be compared. For "2.11.0" this is (2, 11)."""
    major, minor, *_ = re.findall(r"\d+", text)
    return int(major), int(minor)


def _milliseconds_since(begun: float) -> str:
    return f"{(time.perf_counter() - begun) * 1e3:.0f} ms"
