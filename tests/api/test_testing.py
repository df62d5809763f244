"""The plugin for pytest, in runs of pytest of its own: what is shown, selected, captured and kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nn_parallel import testing
from nn_parallel._engine.failures import Failure, rank_error
from tests.support.terminal import run_on_terminal

TESTS = """
import os
import pytest
import torch
import torch.distributed as dist
from nn_parallel import current_world, initialize_ddp

VALUE = 3
pids = set()


@pytest.fixture
def double():
    return 2 * VALUE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [1, 10])
def test_passes(factor, double, tmp_path):
    total = torch.ones(1) * factor * (initialize_ddp().rank + 1)
    dist.all_reduce(total)
    assert total.item() == 3 * factor
    assert double == 6
    assert tmp_path.is_dir()


@pytest.mark.ranks(3)
def test_fails_on_two():
    print("said by", current_world().rank)
    left = [1, 2, current_world().rank]
    assert left == [1, 2, 1]


@pytest.mark.ranks(2)
class TestClass:
    def test_in_a_class(self):
        assert current_world().world_size == 2

    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    def test_is_expected_to_fail(self):
        1 / current_world().rank

    def test_skips(self):
        pytest.skip("not today")


@pytest.mark.ranks(2)
def test_cannot_be_sent(capsys):
    pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [False, True])
def test_patches(monkeypatch, again):
    assert "PATCHED" not in os.environ
    monkeypatch.setenv("PATCHED", "yes")


@pytest.mark.ranks
def test_of_how_many():
    pass


def test_here():
    assert current_world().world_size == 1
"""


def _pytest(folder: Path, *options: str) -> str:
    """What a run of pytest in a folder prints."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100).stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_it.py").write_text(TESTS)
    return _pytest(folder, "-v")


@pytest.mark.slow
def test_each_ends_as_it_would_in_one_process(shown: str) -> None:
    """Passed, failed, skipped, expected to fail; an error where it cannot be sent or the marker says nothing."""
    ends = dict(line.split("::", 1)[1].split()[:2] for line in shown.splitlines() if line.startswith("test_it.py::"))
    assert ends == {
        "test_passes[1]": "PASSED",
        "test_passes[10]": "PASSED",
        "test_fails_on_two": "FAILED",
        "TestClass::test_in_a_class": "PASSED",
        "TestClass::test_is_expected_to_fail": "XFAIL",
        "TestClass::test_skips": "SKIPPED",
        "test_cannot_be_sent": "FAILED",
        "test_patches[False]": "PASSED",
        "test_patches[True]": "PASSED",
        "test_of_how_many": "FAILED",
        "test_here": "PASSED",
    }


@pytest.mark.slow
def test_a_failure_tells_its_rank_and_the_rewritten_assert(shown: str) -> None:
    """With the traceback from there; what each rank printed has its rank before it."""
    told = re.search(r"^On rank ([02]):\n\n(.*?)\n\n", shown, re.MULTILINE | re.DOTALL)  # who is first ends the other
    assert told is not None
    assert f"AssertionError: assert [1, 2, {told[1]}] == [1, 2, 1]" in told[2]
    line = TESTS[: TESTS.index("assert left ==")].count("\n") + 1
    assert f'test_it.py", line {line}, in test_fails_on_two' in told[2]
    assert f"[rank {told[1]}] said by {told[1]}\n" in shown


@pytest.mark.slow
def test_what_cannot_be_is_said_without_our_frames(shown: str) -> None:
    """Which fixture cannot be sent, and what the marker takes."""
    assert "\nn of @pytest.mark.ranks(n)=None must be an integer" in shown
    assert "\nArgument 'capsys'" in shown
    assert "nn_parallel/executor" not in shown


def test_equal_failures_are_told_once() -> None:
    """With all their ranks."""
    failures = {}
    for rank in range(4):
        try:
            raise ValueError("odd" if rank == 3 else "everywhere")
        except ValueError as error:
            failures[rank] = Failure.from_exception(error, f"rank {rank}").rebuild({"ValueError": ValueError})
    told = testing._told_by_all(rank_error("f()", 4, failures))
    assert re.findall("^(?:On|ValueError).*", told, re.MULTILINE) == [
        "On ranks 0-2:",
        "ValueError: everywhere",
        "On rank 3:",
        "ValueError: odd",
    ]


def test_who_marks_no_test_imports_no_torch(tmp_path: Path) -> None:
    """The plugin is there in every run of pytest."""
    (tmp_path / "test_it.py").write_text("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    assert "1 passed" in _pytest(tmp_path, "-p", "no:hypothesispytest")


@pytest.mark.slow
def test_the_first_rank_that_fails_is_debugged(tmp_path: Path) -> None:
    """With ``--pdb``, on the terminal of pytest, once; the report is as ever, and the next test passes."""
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--pdb", "--color=no", "-k", "on_two or in_a_class"]
    typed = [b"q\n", b"p left\n"]

    def answer(shown: str) -> bytes:  # what the other ranks print may follow a prompt
        return typed.pop() if typed and shown.count("(Pdb) ") > 2 - len(typed) else b""

    _, text = run_on_terminal(command, answer, cwd=tmp_path)
    [(rank, third)] = re.findall(r"On rank (\d): AssertionError.*?\(Pdb\).*?\n\[1, 2, (\d)\]\n", text, re.DOTALL)
    assert rank == third
    assert text.count("(Pdb) ") == 2
    assert f"On rank {rank}:\n\nTraceback" in text
    assert "1 failed, 1 passed" in text


@pytest.mark.slow
def test_the_ranks_are_kept_and_end_with_the_run(tmp_path: Path) -> None:
    """The same processes for each test of as many; none is left."""
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, pytest\n\n"
        "@pytest.mark.ranks(2)\n@pytest.mark.parametrize('k', range(5))\n"
        f"def test_it(k):\n    pathlib.Path({str(tmp_path)!r}, f'pid{{os.getpid()}}').touch()\n"
    )
    assert "5 passed" in _pytest(tmp_path)
    pids = [path.name.removeprefix("pid") for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_what_ranks_cover_is_reported(tmp_path: Path) -> None:
    """By pytest-cov, with coverage's own patch for processes: the lines that ran on a rank only."""
    (tmp_path / "covered.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tmp_path / "test_covered.py").write_text(
        "import covered\nimport pytest\n\n@pytest.mark.ranks(2)\ndef test_f():\n    assert covered.f(1) == 1\n"
    )
    (tmp_path / ".coveragerc").write_text("[run]\npatch = subprocess\nparallel = true\n")
    command = [sys.executable, "-m", "pytest", "-q", "--cov=covered", "--cov-report=term-missing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^covered.py +4 +1 +75% +4$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_the_plugin_may_be_imported_before_it_is_loaded(tmp_path: Path) -> None:
    """Without a warning of pytest that it can no longer rewrite the asserts of the plugin, which has none."""
    (tmp_path / "conftest.py").write_text("import nn_parallel.testing\n")
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.ranks(2)\ndef test_it():\n    pass\n")
    # Without the entry point, as for an editable installation in another folder, pytest does not know all of its files.
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "pytest_nn_parallel", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
