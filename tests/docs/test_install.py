"""What an installation gives, from a clone with the obvious name or a wheel: the package, its command, its types."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import nn_parallel
from tests.support.paths import ROOT

PACKAGE = Path(nn_parallel.__file__).parent
SCRIPT = """
from typing import assert_type
import nn_parallel

def package() -> str | None:
    return nn_parallel.__file__

def with_device(x: int, device: object) -> str:
    return f"{device}{x}"

with nn_parallel.ParallelExecutor(num_workers=1, devices="cpu") as ex:
    found = assert_type(ex.run(package), list[str | None])
    devices = list(ex.map(with_device, range(2), chunksize=2))
print(package(), *found, *devices)
"""
MYPY = """
[mypy]
strict = true
[mypy-torch.*]
follow_imports = skip
"""
WITHOUT_NETWORK = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """One whose folder is called as the package. So where it lies beside a script it comes first on the path."""
    clone = tmp_path / "nn_parallel"
    shutil.copytree(PACKAGE, clone / "nn_parallel", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pytest_nn_parallel.py", clone)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of an environment that has torch, pip and mypy, and not this package."""
    python = str(tmp_path / "venv" / "bin" / "python")
    venv.create(tmp_path / "venv")
    [there] = _run([python, "-c", "import site; print(*site.getsitepackages())"], tmp_path).split()
    Path(there, "others.pth").write_text("\n".join(site.getsitepackages()))  # their own .pth files are not read
    return python


@pytest.mark.slow
def test_a_script_beside_the_clone_finds_the_package_and_its_types(tmp_path: Path, clone: Path, python: str) -> None:
    """It, a worker and mypy look on."""
    _run([python, "-m", "pip", "install", *WITHOUT_NETWORK, "--editable", str(clone)], tmp_path)
    _use(python, tmp_path, clone / "nn_parallel")


@pytest.mark.slow
def test_the_wheel(tmp_path: Path, clone: Path, python: str) -> None:
    """It is made from the source distribution, holds nothing but the package, and is all that a script needs."""
    _run([sys.executable, "-m", "build", "--no-isolation", str(clone)], tmp_path)
    [archive], [wheel] = ([str(path) for path in (clone / "dist").glob(kind)] for kind in ("*.tar.gz", "*.whl"))
    _run([sys.executable, "-m", "twine", "check", "--strict", archive, wheel], tmp_path)
    shutil.unpack_archive(wheel, tmp_path / "unpacked", format="zip")
    top, metadata = {path.name for path in (tmp_path / "unpacked").iterdir()}, f"nn_parallel-{nn_parallel.__version__}"
    assert top == {"nn_parallel", "pytest_nn_parallel.py", f"{metadata}.dist-info"}
    assert (tmp_path / "unpacked" / f"{metadata}.dist-info" / "licenses" / "LICENSE").exists()

    _run([python, "-m", "pip", "install", *WITHOUT_NETWORK, "--force-reinstall", wheel], tmp_path)
    shutil.rmtree(clone)
    [there] = (tmp_path / "venv").glob("lib/*/site-packages")
    _use(python, tmp_path, there / "nn_parallel")
    told = _run([str(Path(python).with_name("nn-parallel")), "--version"], tmp_path)
    assert told == f"nn-parallel {nn_parallel.__version__}\n"


def _use(python: str, folder: Path, package: Path) -> None:
    """A script in ``folder`` and its worker find ``package``, and mypy its types."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "mypy.ini").write_text(MYPY)
    init = str(package / "__init__.py")
    assert _run([python, "script.py"], folder).split() == [init, init, "cpu0", "cpu1"]
    _run([python, "-m", "mypy", "script.py"], folder)


def _run(command: list[str], folder: Path) -> str:
    """What it prints."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
