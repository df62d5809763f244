"""Bars that workers draw are one line each on a terminal and under a cell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nn_parallel._engine.pool.bars import Screen
from tests.support.notebook import run_cells
from tests.support.terminal import run_on_terminal

SCRIPT = """
import pathlib, time, tqdm
from nn_parallel import ParallelExecutor, current_world

def work():
    rank = current_world().rank
    for epoch in tqdm.trange(1, desc="epoch", ncols=50):
        for batch in tqdm.trange(1, desc="batch", ncols=50, leave=False):
            while not pathlib.Path({go!r}).exists():
                time.sleep(0.01)
        print("loss", rank)

with ParallelExecutor(num_workers=2, devices="cpu") as ex:
    ex.run(work)
"""
WATCHED = """
import pathlib
publish = get_ipython().display_pub.publish

def watched(data, **more):
    publish(data, **more)
    if data["text/plain"].count("\\n") == 3:
        pathlib.Path({go!r}).touch()

get_ipython().display_pub.publish = watched
"""
BARS = [f"[rank {rank}] {name}:   0%" for rank in range(2) for name in ("epoch", "batch")]
ENDED = {f"[rank {rank}] epoch: 100%" for rank in range(2)}


def shown(text: str) -> set[str]:
    """The lines; of those of bars, what stands before the bar."""
    return {line.partition("|")[0] for line in text.splitlines()}


@pytest.mark.parametrize(
    ("printed", "seen", "bars"),
    [
        (["one\n", "tw", "o\n"], ["one\n", "", "two\n"], []),
        (["one\r\n"], ["one\n"], []),
        (["\n", "a\n"], ["", "\na\n"], []),
        (["\r 0%", "\r 50%"], ["", ""], ["# 50%"]),
        (["\r 0%", "\r100%\n"], ["", ""], ["#100%"]),
        (["\r100%\n", "next\n"], ["", "#100%\nnext\n"], []),
        (["\r 50%", "\r    \r"], ["", ""], []),
        (["\r 50%", "\r    \r", "next\n"], ["", "", "next\n"], []),
        (["\router", "\n", "\rinner", "\x1b[A", "\n\rinner 2\x1b[A"], [""] * 5, ["#outer", "#inner 2"]),
        (["\router\n\rinner\x1b[A", "\router 2", "\n\r     \r\x1b[A", "\n"], [""] * 4, ["#outer 2"]),
        (["\ro\n\ri\x1b[A", "\n\r  \x1b[A", "\ro 2", "\n\ri 2\x1b[A"], [""] * 4, ["#o 2", "#i 2"]),
        (["\n\n\rthird\x1b[A\x1b[A"], [""], ["#third"]),
        (["\x1b[A\rup"], [""], ["#up"]),
    ],
)
def test_a_screen(printed: list[str], seen: list[str], bars: list[str]) -> None:
    """Plain lines are seen as they end, bars as long as they may be drawn again."""
    screen = Screen("", bar_prefix="#")
    assert [screen.print(text, flush=False) for text in printed] == seen
    assert screen.bars == bars
    assert screen.end() == "".join(f"{bar}\n" for bar in bars)
    assert screen.is_empty


def test_a_screen_is_flushed() -> None:
    """What has ended is seen then, and a line that has not; a bar that is drawn stays."""
    screen = Screen("> ", bar_prefix="#")
    assert screen.print("\rdone\n\rdrawn", flush=True) == "#done\n"
    assert screen.bars == ["#drawn"]
    assert screen.print("\nabc", flush=True) == "#drawn\n> abc"
    assert screen.is_empty


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """The file for which the workers wait, whose bars are all drawn then."""
    return tmp_path / "go"


@pytest.mark.slow
def test_on_a_terminal(go: Path) -> None:
    """The bars of both ranks are drawn at once, below what has been printed, and the cursor goes back up."""

    def answer(text: str) -> bytes:
        if shown(text.rpartition("\x1b[J")[2]) == {*BARS, "\x1b[3A"}:
            go.touch()
        return b""

    status, text = run_on_terminal([sys.executable, "-c", SCRIPT.format(go=str(go))], answer)
    assert status == 0, text
    assert shown(text.rpartition("\x1b[J")[2]) <= {*ENDED, "loss 0", "loss 1"}


@pytest.mark.slow
def test_in_a_file(go: Path) -> None:
    """All that tqdm writes, as it is, so that what reads the file sees what it would see of one process."""
    go.touch()
    command = [sys.executable, "-c", SCRIPT.format(go=str(go))]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for drawn in (b"\repoch:   0%", b"\rbatch:   0%", b"\repoch: 100%"):
        assert done.stderr.count(drawn) >= 2  # by each rank, and once more where tqdm finds that time has passed
    assert sorted(done.stdout.splitlines()) == [b"loss 0", b"loss 1"]


@pytest.mark.slow
def test_in_a_notebook(go: Path) -> None:
    """Under the cell they are drawn again, and in the end they are lines of the cell."""
    _, (text, error) = run_cells(WATCHED.format(go=str(go)), SCRIPT.format(go=str(go)))
    assert error is None
    displayed = re.findall("⟦(.*?)⟧", text, re.DOTALL)
    assert set(BARS) in map(shown, displayed), displayed
    assert displayed[-1] == ""
    assert shown(re.sub("⟦.*?⟧", "", text, flags=re.DOTALL)) == {*ENDED, "loss 0", "loss 1"}
