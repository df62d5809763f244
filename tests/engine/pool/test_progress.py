"""The bar of a map: of the user or made by it, on a terminal, elsewhere, under a launcher."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from nn_parallel import ParallelExecutor
from tests.support.terminal import run_on_terminal

SCRIPT = """
from nn_parallel import ParallelExecutor

def double(x):
    return 2 * x

with ParallelExecutor(devices="cpu"{workers}) as ex:
    assert list(ex.map(double, range(6), progress=True)) == [0, 2, 4, 6, 8, 10]
"""


@pytest.fixture(autouse=True)
def no_monitor() -> Iterator[None]:
    """Without what stays of tqdm: its thread, and the semaphore of its lock, which tests/conftest.py removes too."""
    tqdm.set_lock(threading.RLock())
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0
    yield
    tqdm.monitor_interval = before


@pytest.mark.parametrize("chunksize", [1, 2])
def test_a_bar_of_the_user(chunksize: int) -> None:
    """It counts results, not chunks, and stays open."""
    with tqdm(total=10, file=io.StringIO()) as bar, ParallelExecutor(num_workers=2, devices="cpu") as ex:
        for part in (range(4), range(4, 10)):
            assert list(ex.map(abs, part, progress=bar, chunksize=chunksize)) == list(part)
        assert bar.n == 10


def test_a_bar_counts_up_to_what_failed() -> None:
    """And the error is the call's own."""
    with tqdm(total=3, file=io.StringIO()) as bar, ParallelExecutor(num_workers=2, devices="cpu") as ex:
        with pytest.raises(ZeroDivisionError):
            list(ex.map(lambda x: 1 / x, [1, 2, 0], progress=bar))
        assert bar.n == 2


@pytest.mark.parametrize("value", [True, False, None])
def test_where_there_is_no_terminal_there_is_no_bar(value: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed."""
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        assert list(ex.map(abs, [-1, -2], progress=value)) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_what_is_no_bar() -> None:
    """It is said at once."""
    with ParallelExecutor(num_workers=1, devices="cpu") as ex, pytest.raises(TypeError, match="progress='yes' must be"):
        ex.map(abs, [1], progress="yes")


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to install."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with ParallelExecutor(num_workers=1, devices="cpu") as ex, pytest.raises(ImportError, match="pip install tqdm"):
        ex.map(abs, [1], progress=True)


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True])
def test_on_a_terminal(launched: bool, tmp_path: Path) -> None:
    """One bar: of all items, or of the share of rank 0."""
    (tmp_path / "script.py").write_text(SCRIPT.format(workers="" if launched else ", num_workers=2"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launched else []
    status, shown = run_on_terminal([sys.executable, *launcher, "script.py"], cwd=tmp_path)
    assert status == 0, shown
    assert re.search(rf"double\(\): 100%\|█+\| {3 if launched else 6}/", shown), shown
    assert (" 6/6" in shown) is not launched
