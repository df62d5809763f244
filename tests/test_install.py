"""What `pip install -e .` gives in a clone with the obvious name: the package, and its types."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
from typing import assert_type
import nn_parallel

def package() -> str | None:
    return nn_parallel.__file__

with nn_parallel.ParallelExecutor(num_workers=1, devices="cpu") as ex:
    found = assert_type(ex.run(package), list[str | None])
print(package(), *found)
"""
MYPY = """
[mypy]
strict = true
[mypy-torch.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_script_beside_the_clone_finds_the_package_and_its_types(tmp_path: Path) -> None:
    """There the clone itself, which is no package, comes first on the path; the script, a worker and mypy look on."""
    clone, python = tmp_path / "nn_parallel", str(tmp_path / "venv" / "bin" / "python")
    shutil.copytree(ROOT / "nn_parallel", clone / "nn_parallel", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, clone)
    venv.create(tmp_path / "venv")
    [there] = _run([python, "-c", "import site; print(*site.getsitepackages())"], tmp_path).split()
    Path(there, "others.pth").write_text("\n".join(site.getsitepackages()))  # torch, pip, mypy; no .pth file of theirs
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--editable", str(clone)], tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(MYPY)
    package = str(clone / "nn_parallel" / "__init__.py")
    assert _run([python, "script.py"], tmp_path).split() == [package, package]
    _run([python, "-m", "mypy", "script.py"], tmp_path)


def _run(command: list[str], folder: Path) -> str:
    """What it prints."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
