"""The command line: ``nn-parallel gpus | run | doctor | stacks``, or ``python -m nn_parallel``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from . import GPU, LaunchError, list_gpus, parse_gpu_selection, select_gpus
from ._engine.devices import accelerators, as_table, cpu_count
from ._engine.ranks.environment import detect_launch
from ._engine.stack_dump import by_call_site, name_of, stacks_below, users_part
from ._version import __version__
from .doctor import examine

PROGRAM = "nn-parallel"
COLUMNS = {
    "GPU": "index",
    "name": "name",
    "free MiB": "memory_free_mb",
    "of MiB": "memory_total_mb",
    "busy %": "utilization",
    "°C": "temperature",
    "UUID": "uuid",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` contain, and return the exit status.

    Args:
        arguments: the arguments after the name of the program. If None, they are those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["run"]:
            return _run(given[1:])
        options = _parser().parse_args(given)
        return {"gpus": _gpus, "doctor": _doctor, "stacks": _stacks}[options.command](options)
    except (ImportError, LaunchError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="List and choose GPUs, train on all devices, and check or inspect a job."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    gpus = commands.add_parser("gpus", help="list the GPUs and how busy they are, or choose some of them")
    mode = gpus.add_mutually_exclusive_group()
    mode.add_argument("--json", action="store_true", help="print all known properties of all GPUs as JSON")
    mode.add_argument("--auto", type=int, metavar="N", help="print the UUIDs of the N GPUs with the most free memory")
    mode.add_argument("--choose", action="store_true", help="ask which GPUs to use, and print their UUIDs")
    gpus.add_argument(
        "--min-memory", type=int, default=0, metavar="MB", help="with --auto: each GPU must have this many MiB free"
    )
    gpus.epilog = (
        "The output of --auto and --choose is a value for CUDA_VISIBLE_DEVICES, as in "
        f"CUDA_VISIBLE_DEVICES=$({PROGRAM} gpus --auto 2). The command reserves no GPU. To keep other processes that "
        "call select_gpus() away from the chosen GPUs, call select_gpus(2) in the script itself."
    )
    commands.add_parser("run", help=f"start a script on every device by torchrun; see `{PROGRAM} run --help`")
    commands.add_parser("doctor", help="try each part that distributed training needs, and say how to repair it")
    stacks = commands.add_parser("stacks", help="show the Python stacks of all ranks below a process")
    stacks.add_argument("pid", type=int, help="process id of the script, of the launcher or of one rank, on this node")
    return parser


def _gpus(options: argparse.Namespace) -> int:
    if options.auto is not None:
        print(_for_cuda(select_gpus(options.auto, min_memory_mb=options.min_memory)))
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nn_parallel").setLevel(logging.INFO)  # at this level, `list_gpus` logs why it finds no GPU
    gpus = list_gpus()
    if options.json:
        print(json.dumps([asdict(gpu) for gpu in gpus], indent=2))
        return 0
    if gpus:
        print(_table(gpus), file=sys.stderr if options.choose else sys.stdout)
    if options.choose:
        if not sys.stdin.isatty():
            raise ValueError("--choose asks on a terminal, and there is none: use --auto N.")
        print("Which (0,2-3 or all)? ", end="", file=sys.stderr, flush=True)
        print(_for_cuda(parse_gpu_selection(input())))
    return 0


def _run(arguments: list[str]) -> int:
    """Start a script with torchrun, by default with one rank per device.

    If the script runs on a single node, torchrun chooses a free port by default. All options of torchrun work.
    """
    parser = torchrun.get_args_parser()
    parser.prog = f"{PROGRAM} run"
    parser.add_argument("--gpus", metavar="SEL", help="the GPUs to use: 0,2-3 or all or GPU-uuid,GPU-uuid")
    parser.add_argument("--nproc", dest="nproc_per_node", help="number of ranks on this node; default: one per device")
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=None)
    options = parser.parse_args(arguments)
    if options.gpus is not None:
        chosen = parse_gpu_selection(options.gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = _for_cuda(chosen)
    if options.nproc_per_node is None:
        options.nproc_per_node = str(len(chosen) if options.gpus is not None else len(accelerators()) or cpu_count())
    if options.nnodes == "1" and not options.rdzv_endpoint and options.master_port is None:
        options.standalone = True  # torchrun then chooses a free port on the loopback interface
    if options.nproc_per_node.lstrip("-").isdecimal():  # torchrun also takes words, for instance `auto`
        if (ranks := int(options.nproc_per_node)) < 1:
            parser.error(f"--nproc={ranks} must be at least 1")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // ranks)))  # torchrun itself would set it to 1
    try:
        record(torchrun.run)(options)
    except ChildFailedError as error:  # the ranks printed their tracebacks; the error is torchrun's summary
        print(error, file=sys.stderr)
        return 1
    return 0


def _doctor(_: argparse.Namespace) -> int:
    try:
        launch = detect_launch(os.environ)
    except LaunchError:  # `examine` reports this error as a finding
        launch = None
    is_main = launch is None or launch.rank == 0
    report = examine(lambda finding: print(finding, flush=True) if is_main else None)
    if not is_main and not dist.is_initialized():  # without a world, rank 0 cannot print the findings of this rank
        print(report)
    return 0 if report else 1


def _stacks(options: argparse.Namespace) -> int:
    if options.pid < 1:
        raise ValueError(f"{options.pid} is no process id.")
    stacks = stacks_below(options.pid)
    names = {pid: name_of(pid, _launched_rank) for pid in stacks}
    full_names = {pid: f"{name} (pid {pid})" for pid, name in names.items()}
    count = Counter(names.values())  # a name occurs twice if the script has two pools, which both have a rank 0
    print(by_call_site({full_names[pid] if count[names[pid]] > 1 else names[pid]: stacks[pid] for pid in stacks}))
    for pid, stack in stacks.items():
        print(f"\n{full_names[pid]}, innermost frame first:\n{users_part(stack) or '  It has no Python frame.'}")
    return 0


def _launched_rank(environ: Mapping[str, str]) -> int | None:
    try:
        launch = detect_launch(environ)
    except LaunchError:
        return None
    return None if launch is None else launch.rank


def _for_cuda(gpus: list[GPU]) -> str:
    """Return a value for ``CUDA_VISIBLE_DEVICES``: UUIDs, because CUDA and NVML may number the GPUs differently."""
    return ",".join(gpu.uuid for gpu in gpus)


def _table(gpus: list[GPU]) -> str:
    rows = [list(COLUMNS)]
    for gpu in gpus:
        values = asdict(gpu)
        rows.append(["-" if values[name] is None else str(values[name]) for name in COLUMNS.values()])
        if not gpu.is_visible:
            rows[-1][-1] += " (hidden)"
    return as_table(rows)


if __name__ == "__main__":
    sys.exit(main())
