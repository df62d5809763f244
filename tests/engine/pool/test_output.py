"""What workers print."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nn_parallel import (
    ParallelExecutor,
    current_world,
)
from nn_parallel._engine.pool.output import Output


def test_output_can_name_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """With prefix_output each line begins with the rank, on both streams."""
    with ParallelExecutor(num_workers=2, devices="cpu", prefix_output=True) as pool:
        pool.run(lambda: print("one\ntwo"))
        pool.run(lambda: print("three", file=sys.stderr))
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]
    assert sorted(captured.err.splitlines()) == ["[rank 0] three", "[rank 1] three"]


def test_what_workers_print_appears_here(own_executor2: ParallelExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines, in sys.stdout and sys.stderr as they are now, before the call returns."""

    def talk() -> None:
        rank = current_world().rank
        print("out", rank)
        print("err", rank, file=sys.stderr)
        print("no newline", end="")

    own_executor2.run(talk)
    captured = capsys.readouterr()
    assert captured.out.count("no newline") == 2
    assert {"out 0", "out 1"} <= set(captured.out.replace("no newline", "").splitlines())
    assert set(captured.err.splitlines()) == {"err 0", "err 1"}


def test_an_endless_writer_does_not_hold_up_the_others(
    own_executor2: ParallelExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child of one worker floods its output: the other worker's answers still come."""
    started = own_executor2.submit(lambda: subprocess.Popen(["yes", "x" * 1000]).pid).result()
    assert [own_executor2.submit(len, [1]).result(10) for _ in range(20)] == [1] * 20
    own_executor2.submit(os.kill, started, signal.SIGKILL).result(10)
    capsys.readouterr()


ROWS = [b"1,2\r\n", bytes(range(0xF0, 0x100)), b"10%\rdone\n", b"\n\n", "\u00fc".encode()]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [b"", b"[rank 0] "])
def test_a_file_gets_the_bytes_as_they_are(tmp_path: Path, prefix: bytes) -> None:
    """Line ends of Windows, what is no text, bars; with ``prefix_output`` each line after its rank."""
    code = f"""
import os
from nn_parallel import ParallelExecutor
with ParallelExecutor(num_workers=1, devices="cpu", prefix_output={bool(prefix)}) as ex:
    print("the script's own")
    for row in {ROWS}:
        ex.submit(os.write, 1, row).result()
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    printed = b"".join(ROWS)
    lines = (prefix + line for line in printed.split(b"\n"))
    assert done.stdout == b"the script's own\n" + b"\n".join(lines)


def test_bars_of_two_workers_in_a_file_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar stays with its carriage return, also if the bar and the next one arrive apart."""
    with open(tmp_path / "file", "w+") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        pipes = [os.pipe() for _ in range(2)]
        outputs = [Output(read, "stdout", rank, has_prefix=False) for rank, (read, _) in enumerate(pipes)]
        for part in (b"\r 0%", b"\r 50%", b"\r100%\n"):
            for output, (_, write) in zip(outputs, pipes, strict=True):
                os.write(write, part)
                output.copy()
        for output, (_, write) in zip(outputs, pipes, strict=True):
            os.close(write)
            output.close()
    assert (tmp_path / "file").read_bytes() == b"\r 0%\r 0%" + b"\r 50%\r100%\n" * 2


def test_a_stream_of_text_gets_text(own_executor2: ParallelExecutor) -> None:
    """As `io.StringIO`, which takes no bytes: a character may arrive in two parts."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        own_executor2.submit(lambda: [os.write(1, part) for part in (b"a\r\n\xc3", b"\xbc\xff\n")]).result()
    assert stream.getvalue() == "a\r\n\u00fc\ufffd\n"
