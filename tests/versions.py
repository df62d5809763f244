"""The tests with other versions of Python and torch: ``python -m tests.versions``, from the root of a clone.

Every Python that the package declares, with the oldest torch that it declares, the pinned one and the newest, each pair
in an environment of its own, which is deleted afterwards (with torch's CUDA libraries it takes 5 GB). The package is
installed from its wheel, the tests are those of the source distribution, and no source of the package lies beside them.
Each pair has a line in the table of ``docs/project/tested_on.md``, which this writes.

With ``--unpinned`` everything but torch is the newest that pip finds, as for a person who installs the package today.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS = (ROOT / "tests" / "constraints.txt").read_text()
PAGE = ROOT / "docs" / "project" / "tested_on.md"
NEWEST = "newest"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=_declared_pythons(), metavar="3.X", help="with these only")
    parser.add_argument("--torch", nargs="+", default=_declared_torches(), metavar="2.X.Y", help="with these only")
    parser.add_argument("--unpinned", action="store_true", help="with the newest of all else; this is not recorded")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --; such a run is not recorded")
    options = parser.parse_args()
    failed = list[str]()
    with tempfile.TemporaryDirectory(prefix="versions") as folder:
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        for python, torch in itertools.product(options.python, options.torch):
            if _test(Path(folder), python, torch, options.unpinned, options.arguments) != 0:
                failed.append(f"Python {python}, torch {torch}")
    print("\n".join(["Failed with:", *failed]) if failed else "All passed.")
    return bool(failed)


def _declared_pythons() -> list[str]:
    classifiers = metadata.metadata("nn_parallel").get_all("Classifier") or []
    return re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))


def _declared_torches() -> list[str]:
    """The oldest, the pinned and the newest."""
    [oldest] = re.findall(r"^torch>=([\d.]+)", "\n".join(metadata.requires("nn_parallel") or []), re.MULTILINE)
    [pinned] = re.findall(r"^torch==(.+)", PINS, re.MULTILINE)
    return [f"{oldest}.*", pinned, NEWEST]


def _test(folder: Path, python: str, torch: str, unpinned: bool, arguments: list[str]) -> int:
    """Run the tests with these versions; ``folder`` holds the wheel and the source distribution."""
    with tempfile.TemporaryDirectory(prefix=f"python{python}", dir=folder) as inside:
        [archive], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
        shutil.unpack_archive(archive, inside, filter="data")
        [tests] = Path(inside).iterdir()
        shutil.rmtree(tests / "nn_parallel")
        (tests / "pytest_nn_parallel.py").unlink()

        venv, pins = Path(inside, "venv"), Path(inside, "pins.txt")
        subprocess.run([interpreter(python), "-m", "venv", venv], check=True)
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "CI")}
        environ |= {"PATH": f"{venv}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(venv)}
        others = "" if unpinned else re.sub(r"^(torch|setuptools)==.*\n", "", PINS, flags=re.MULTILINE)
        pins.write_text(others)  # torch itself limits setuptools
        wanted = "torch" if torch == NEWEST else f"torch=={torch}"
        install = f"pip install --quiet -c {pins} {wanted} {wheel}[test]"
        subprocess.run(install.split(), check=True, cwd=tests, env=environ)
        subprocess.run(["pip", "check"], check=True, cwd=tests, env=environ)

        ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
        answer = subprocess.run(
            [f"{venv}/bin/python", "-c", ask], check=True, capture_output=True, text=True, cwd=inside
        )
        found = answer.stdout.split()
        print(f"\n$ python -m pytest {' '.join(arguments)}  # Python {', torch '.join(found)}", flush=True)
        command = [f"{venv}/bin/python", "-u", "-m", "pytest", *arguments]
        with subprocess.Popen(command, cwd=tests, env=environ, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                print(line, end="", flush=True)
        if not arguments and not unpinned:
            _record(*found, line.strip("= \n"))
        return running.returncode


def interpreter(version: str) -> str:
    """Of that minor version: beside the interpreter that runs this, as pyenv lays them out, or on the PATH."""
    beside = Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}")
    if found := next(map(str, beside), None) or shutil.which(f"python{version}"):
        return found
    raise SystemExit(f"python{version} is not on the PATH, nor beside {sys.base_prefix}.")


def _record(python: str, torch: str, result: str) -> None:
    """Put the line of these two versions into the page, in the place of an earlier one."""
    lines = PAGE.read_text().splitlines()
    first = lines.index("| Python | torch | `python -m pytest` | date |") + 2
    end = next(index for index in range(first, len(lines)) if not lines[index].startswith("|"))
    begin = f"| {python} | {torch} |"
    rows = [line for line in lines[first:end] if not line.startswith(begin)]
    lines[first:end] = sorted([*rows, f"{begin} {result} | {datetime.date.today()} |"])
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
