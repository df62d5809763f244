"""Run the training loops of this folder, and compare what they print: ``python -m tests.loops [LOOP ...]``.

Each folder holds one loop, written four times: ``single.py`` for one device, ``ddp.py`` with torch's own
`DistributedDataParallel`, ``ours.py`` with nn_parallel and ``accelerated.py`` with accelerate. What they share is in
``parts.py``, and what all loops share is in ``shared.py``. Each prints lines that begin with ``result``, once and not
on every rank: losses and a checksum of the parameters, with all digits.

On one rank ``ours.py`` must print what ``single.py`` prints. On three ranks it must print what ``ddp.py`` prints: under
torchrun, in a pool, and on Ray. accelerate shares the samples out in another way, so its results are not compared. Its
script must only run. It is left out if accelerate is not installed.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RANKS = 3
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
POOL = """
import runpy
import sys
from nn_parallel import ParallelExecutor

engine = sys.argv.pop()  # the workers get the arguments that remain
if engine == "ray":
    import ray

    ray.init(num_cpus={ranks}, include_dashboard=False, log_to_driver=True)


def script():
    runpy.run_path("ours.py", run_name="__main__")


with ParallelExecutor(num_workers={ranks}, devices="cpu", engine=engine) as ex:
    ex.run(script)
"""


def main() -> int:
    loops = sorted(path.parent.name for path in HERE.glob("*/single.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.loops", description=__doc__.splitlines()[0])
    parser.add_argument("loops", nargs="*", default=loops, metavar="LOOP", help=f"of {', '.join(loops)}; default: all")
    print("| loop | lines | DDP | nn_parallel | accelerate | results | equal on |\n|---|---|---|---|---|---|---|")
    wrong = [_row(name) for name in parser.parse_args().loops]
    return any(wrong)


def _row(name: str) -> bool:
    """Print the row of one loop. Return whether some results are different."""
    folder = HERE / name
    alone, ddp = _results(folder, [sys.executable, "single.py"]), _results(folder, [*TORCHRUN, "ddp.py"])
    pairs = {
        "one rank": (alone, _results(folder, [sys.executable, "ours.py"])),
        "torchrun": (ddp, _results(folder, [*TORCHRUN, "ours.py"])),
        "a pool": (ddp, _results(folder, [sys.executable, "pool.py", "local"])),
        "Ray": (ddp, _results(folder, [sys.executable, "pool.py", "ray"])),
    }
    if importlib.util.find_spec("accelerate"):
        _results(folder, [*TORCHRUN, "accelerated.py"])
    equal = [where for where, (expected, found) in pairs.items() if expected == found]
    lines = len((folder / "single.py").read_text().splitlines())
    changes = [_changed(folder, script) for script in ("ddp.py", "ours.py", "accelerated.py")]
    print("|", " | ".join([name, str(lines), *changes, str(len(ddp)), ", ".join(equal)]), "|", flush=True)
    for where in pairs.keys() - equal:
        expected, found = pairs[where]
        print(*difflib.unified_diff(expected, found, "expected", where, lineterm="", n=0), sep="\n")
    return len(equal) < len(pairs)


def _results(folder: Path, command: list[str]) -> list[str]:
    """Run a script in a copy of its folder. Return the lines with its results."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        Path(copy, "pool.py").write_text(POOL.format(ranks=RANKS))
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environ |= {"ACCELERATE_USE_CPU": "1", "RAY_AUTH_MODE": "disabled"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=copy, env=environ)
    if done.returncode != 0:
        raise SystemExit(f"{folder.name}: {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    results = re.findall(r"\bresult .*", done.stdout)
    if not results:
        raise SystemExit(f"{folder.name}: {' '.join(command)} has printed no results")
    return results


def _changed(folder: Path, script: str) -> str:
    """The lines of the script that are not in the loop for one device, and the lines of that loop that are gone."""
    before, after = ((folder / file).read_text().splitlines() for file in ("single.py", script))
    difference = list(difflib.unified_diff(before, after, n=0))[2:]
    added, removed = (sum(line.startswith(sign) and len(line) > 1 for line in difference) for sign in "+-")
    return f"+{added} -{removed}"


if __name__ == "__main__":
    sys.exit(main())
