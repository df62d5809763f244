"""The table of requirements has no hole: each row names what gives the feature, and tests that exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nn_parallel
from tests.support.paths import ROOT

TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "project" / "requirements.md"
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| feature")
]


def names_in(name: str) -> set[str]:
    tree = ast.parse((TESTS / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_is_there(row: tuple[str, ...]) -> None:
    """Public names, or torch's, or the example; and one test at least."""
    _, given_by, shown_by = row
    named = re.findall(r"`(\w+)(?:`| )", given_by.split("torch:")[0])
    public = [name for name in named if name in nn_parallel.__all__]
    assert (
        public
        or given_by.startswith("torch")
        or given_by == "the example"
        or "nn-parallel run" in given_by
        or "is_main" in given_by
    )
    shown = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", shown_by)
    assert shown
    for file, test in shown:
        assert test in names_in(file), f"{file}::{test}"


def test_every_function_is_among_the_names() -> None:
    """The page of names that others have for it has a line for each; errors and classes aside."""
    page = (ROOT / "docs" / "guide" / "coming_from_accelerate.md").read_text()
    first = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    functions = {name for name in nn_parallel.__all__ if name[0].islower()}
    assert functions == {name for name in re.findall(r"\w+", " ".join(first)) if name in functions}


IDENTITIES = """
import concurrent.futures, contextlib


def _same(value=None, *_args, **_kwargs):
    return value


def _undecorated(*_args, **_kwargs):
    return _same


@contextlib.contextmanager
def _block(*_args, **_kwargs):
    yield None


class _OnlyHere(concurrent.futures.ThreadPoolExecutor):
    def __init__(self, *_args, **_kwargs):
        super().__init__(1)

    def run(self, fn, *args, **kwargs):
        return [fn(*args, **kwargs)]


_others = {
    "ParallelExecutor": _OnlyHere,
    "initialize_ddp": lambda *_args, **_kwargs: World(False, 0, 0, 1, resolve_device("cpu")),
    **dict.fromkeys(("on_rank", "on_local_rank", "parallelize_on_gpus"), _undecorated),
    **dict.fromkeys(("accumulate", "rank_first", "profile_ranks"), _block),
}
"""
GIVEN = {
    (name, tuple(re.findall(r"`(?!gpu/)([\w/]*test_\w+\.py::test_\w+)`", shown_by)))
    for _, given_by, shown_by in ROWS
    for name in re.findall(r"`(\w+)(?:`| )", given_by.split("torch:")[0])
    if name in nn_parallel.__all__
}


@pytest.mark.faults
@pytest.mark.parametrize(("name", "shown_by"), sorted(GIVEN), ids=lambda value: value if isinstance(value, str) else "")
def test_without_its_function_a_row_fails(name: str, shown_by: tuple[str, ...], tmp_path: Path) -> None:
    """With the identity in the place of what gives the feature, one of the tests that show it does not pass."""
    for folder in ("nn_parallel", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / "nn_parallel" / "__init__.py", "a") as file:
        file.write(f"{IDENTITIES}\n{name} = _others.get({name!r}, _same)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in shown_by)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    # A test failed, and is not missing or broken; or pytest has no last word: what is to die in a worker has ended it.
    assert done.returncode == 1 or not re.search(r" in [\d.]+s", done.stdout), done.stdout
