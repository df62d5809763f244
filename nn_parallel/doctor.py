"""`verify_ddp_setup`: try what distributed training needs, and say of each part whether it works and what to do."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from ._engine.devices import accelerators, cpu_count, device_properties
from ._engine.ranks.context import rank_context
from ._engine.ranks.environment import detect_launch, is_loopback
from ._version import __version__
from .ddp import initialize_ddp
from .errors import LaunchError, ParallelError
from .executor import ParallelExecutor
from .gpus import list_gpus

TIMEOUT_S = 60.0
OK, WARNING, FAILED, WAITS = "ok", "warning", "failed", "..."
PART_WIDTH = 14
MARGIN = " " * (PART_WIDTH + 10)
TENSOR_BYTES = 16 << 20
FILES_NEEDED = 1024
SHARED_MEMORY_NEEDED = 1 << 30
SLOW_LOOKUP_S = 0.5
OLDEST_TORCH, OLDEST_LINUX = (2, 11), (5, 3)


class Finding(NamedTuple):
    """What was found of one part."""

    status: str
    part: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        """For a person to read: what was found, and below it what to do."""
        first, *more = self.text.splitlines() or [""]
        if self.advice:
            more.append(f"-> {self.advice}")
        return "\n".join([f"{self.status:<8} {self.part:<{PART_WIDTH}} {first}", *(MARGIN + line for line in more)])


class Report(NamedTuple):
    """What `verify_ddp_setup` found: true if nothing failed, and a table as text."""

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.status != FAILED for finding in self.findings)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.findings))


def verify_ddp_setup() -> Report:
    """Try what distributed training needs: the launch, the devices, the network, a collective of each backend.

    Works under every launcher, where each rank calls it and all get the same report, and alone, where the ranks that
    talk to each other are workers of a pool. What hangs fails after a minute.

    Example::

        report = verify_ddp_setup()
        print(report)  # a line for each part: ok, warning or failed, and what to do
        assert report
    """
    return examine(lambda finding: None)


def examine(show: Callable[[Finding], None]) -> Report:
    """As `verify_ddp_setup`; ``show`` gets each finding as soon as it is known, and for what the next one waits."""
    own = list[Finding]()

    def found(*findings: Finding) -> bool:
        for finding in findings:
            own.append(finding)
            show(finding)
        return own[-1].status != FAILED

    # An older torch raises as it is asked for what it lacks.
    if not found(_launch()) or not found(_software()):
        return Report(tuple(own))
    context = rank_context()
    is_launched = detect_launch(os.environ) is not None if context is None else context.open_store is not None
    found(_system(), *_devices(), *_limits())
    found(*_network())
    if is_launched:
        return Report(tuple(_of_all_ranks(own, show)))
    for kind in dict.fromkeys(["cpu", "all" if accelerators() else "cpu"]):
        found(*_of_workers(kind))
    return Report(tuple(own))


def _launch() -> Finding:
    try:
        launch = detect_launch(os.environ)
    except LaunchError as error:
        return Finding(FAILED, "launch", str(error))
    if launch is None:
        return Finding(OK, "launch", "by no launcher: this process is alone, and starts workers where it needs them")
    place = f"rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank} of {launch.local_world_size}"
    found = f"by {launch.launcher}: {place}, on node {launch.node_rank}\n(from {', '.join(launch.told_by)})"
    return Finding(OK, "launch", found)


def _software() -> Finding:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"nn_parallel {__version__}"]
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if torch.cuda.is_available() and dist.is_nccl_available():
        parts.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    is_old = _number(torch.__version__) < OLDEST_TORCH
    advice = f"install torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}" if is_old else ""
    return Finding(FAILED if is_old else OK, "software", ", ".join(parts), advice)


def _system() -> Finding:
    system, can_pool = f"{platform.system()} {platform.release()}", sys.platform == "linux"
    if can_pool and _number(platform.release()) >= OLDEST_LINUX:
        return Finding(OK, "system", f"{system}, {cpu_count()} cores for this process")
    return Finding(WARNING, "system", system, "ParallelExecutor starts workers on Linux >= 5.3 only (WSL counts)")


def _devices() -> Iterator[Finding]:
    found, gpus = accelerators(), [gpu for gpu in list_gpus() if gpu.is_visible]
    if len(gpus) == len(found):
        names = [gpu.name or "unnamed" for gpu in gpus]  # of CUDA, whose use begins where it is asked itself
    else:
        names = [getattr(device_properties(device), "name", "unnamed") for device in found]
    text = ", ".join(f"{device} ({name})" for device, name in zip(found, names, strict=True)) or "the CPU alone"
    if shown := os.environ.get("CUDA_VISIBLE_DEVICES"):
        text += f", with CUDA_VISIBLE_DEVICES={shown}"
    there = len(gpus) if torch.version.hip is None else 0
    if there > len(found):
        why = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA does not start"
        advice = "install a build of torch that fits the driver (see pytorch.org)"
        yield Finding(WARNING, "devices", f"{text}; NVML sees {there} GPUs, but {why}", advice)
    else:
        yield Finding(OK, "devices", text)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < FILES_NEEDED
    advice = f"raise it, `ulimit -n {FILES_NEEDED}`: tensors on their way take one each" if few else ""
    yield Finding(WARNING if few else OK, "open files", f"at most {files}", advice)
    if os.path.isdir("/dev/shm"):
        room = shutil.disk_usage("/dev/shm").free
        small = room < SHARED_MEMORY_NEEDED
        advice = "DataLoader workers and NCCL need it: `docker run --shm-size=8g`, or `--ipc=host`" if small else ""
        yield Finding(WARNING if small else OK, "/dev/shm", f"{room >> 20} MiB free", advice)


def _network() -> Iterator[Finding]:
    begun, name = time.monotonic(), socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4]  # as gloo asks, of IPv4 or IPv6
        address = str(found[0])
        socket.getnameinfo(found, 0)
    except OSError as error:
        yield Finding(WARNING, "host name", f"{name} cannot be looked up: {error}", f"add {name} to /etc/hosts")
        return
    seconds, text = time.monotonic() - begun, f"{name} is {address}"
    launch = detect_launch(os.environ)
    several = launch is not None and launch.local_world_size < launch.world_size
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        text += f", and GLOO_SOCKET_IFNAME={chosen}"
    if seconds > SLOW_LOOKUP_S:
        advice = "each connection waits so long: put the nodes into /etc/hosts, or RES_OPTIONS='timeout:1 attempts:1'"
        yield Finding(WARNING, "host name", f"{text}, found in {seconds:.1f} s", advice)
    elif several and is_loopback(address) and not chosen:
        interfaces = [interface for _, interface in socket.if_nameindex() if interface != "lo"]
        if len(interfaces) == 1:
            yield Finding(OK, "host name", f"{text}, where other nodes cannot reach it: gloo takes {interfaces[0]}")
            return
        advice = (
            f"set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the one between the nodes, of {', '.join(interfaces)}"
        )
        yield Finding(WARNING, "host name", f"{text}, where other nodes may not reach it", advice)
    else:
        yield Finding(OK, "host name", text)


def _of_all_ranks(own: list[Finding], show: Callable[[Finding], None]) -> list[Finding]:
    """The findings of rank 0, and what the others found that is not as it should be."""
    begun = time.perf_counter()
    launch = detect_launch(os.environ)
    if launch is not None and rank_context() is None:
        where = f"{launch.world_size} ranks at {launch.master_addr}:{launch.master_port}"
        show(Finding(WAITS, "rendezvous", f"for {where}, up to {TIMEOUT_S:g} s"))
    try:
        world = initialize_ddp(TIMEOUT_S)
        met = Finding(OK, "rendezvous", f"{world.world_size} ranks in {_milliseconds(begun)}")
        show(met)
        show(Finding(WAITS, "collectives", f"of all ranks, up to {TIMEOUT_S:g} s"))
        with ParallelExecutor(timeout=TIMEOUT_S) as ex:
            first, *others = ex.run(lambda: [*own, met, *_collectives()])
    except ParallelError as error:
        failed = Finding(FAILED, "ranks", str(error))
        show(failed)
        return [*own, failed]
    bad = [
        finding._replace(part=f"{finding.part} (rank {rank})")
        for rank, findings in enumerate(others, start=1)
        for finding in findings
        if finding.status != OK
    ]
    for finding in (*first[len(own) + 1 :], *bad):
        show(finding)
    return [*first, *bad]


def _of_workers(devices: str) -> list[Finding]:
    """What workers on these devices find, which are ranks of one world; two of them on the CPU."""
    begun = time.perf_counter()
    try:
        with ParallelExecutor(devices=devices, num_workers=2 if devices == "cpu" else None, timeout=TIMEOUT_S) as ex:
            world_size = len(ex.run(os.getpid))
            met = Finding(OK, "workers", f"{world_size} on {devices}, started in {_milliseconds(begun)}")
            return [met, *ex.run(_collectives)[0]]
    except ParallelError as error:
        return [Finding(FAILED, f"workers on {devices}", str(error))]


def _collectives() -> list[Finding]:
    """As one of the ranks: an all_reduce for each kind of device that the group can reach."""
    world = initialize_ddp()
    return [_all_reduce(device, world.world_size) for device in dict.fromkeys([torch.device("cpu"), world.device])]


def _all_reduce(device: torch.device, world_size: int) -> Finding:
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))  # as in cpu:gloo,cuda:nccl
    part = f"{backends[device.type]} on {device.type}"
    ones = torch.ones(TENSOR_BYTES // 4, device=device)
    dist.all_reduce(ones)  # makes the connections
    correct = bool((ones == world_size).all())
    begun = time.perf_counter()
    dist.all_reduce(ones)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - begun
    rate = TENSOR_BYTES / seconds / 1e9
    text = f"all_reduce of {TENSOR_BYTES >> 20} MiB among {world_size} ranks in {seconds * 1e3:.1f} ms, {rate:.2g} GB/s"
    if not correct:
        return Finding(FAILED, part, f"{text}, and the sum is wrong", "try NCCL_P2P_DISABLE=1, and tell us")
    return Finding(OK, part, text)


def _number(text: str) -> tuple[int, int]:
    """Of a release: its first two numbers."""
    major, minor, *_ = re.findall(r"\d+", text)
    return int(major), int(minor)


def _milliseconds(begun: float) -> str:
    return f"{(time.perf_counter() - begun) * 1e3:.0f} ms"
