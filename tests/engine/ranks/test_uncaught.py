"""An exception outside of all blocks: what the ranks that lose the connection by it show above their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import free_port

SCRIPT = """
import os, signal, torch, torch.distributed as dist
from nn_parallel import RankError, initialize_ddp
here = initialize_ddp(timeout=30)
dist.all_reduce(torch.ones(1))
if here.rank == 1:
    {end}
dist.all_reduce(torch.ones(1))
"""
ENDS = {
    "raise ValueError('a bad batch')": r"(?s)On rank 1:\n\nTraceback .*ValueError: a bad batch$",
    "os.kill(os.getpid(), signal.SIGKILL)": r"Rank 1 \(pid \d+ on ",
    "raise RankError('save() failed', {1: OSError('disk full')})": r"(?s)On rank 1:\n\n.*OSError: disk full",
    "raise SystemExit": r"Rank 1 has left: it is at its end, or called cleanup_ddp\(\)\.$",
}


@pytest.mark.slow
@pytest.mark.parametrize(("end", "told"), ENDS.items())
def test_the_cause_is_shown_first(end: str, told: str, tmp_path: Path) -> None:
    """That of the rank which ended first; whoever has left as it should has not died."""
    (script := tmp_path / "script.py").write_text(SCRIPT.format(end=end))
    shared = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    printed = [rank.communicate(timeout=60)[1].decode() for rank in ranks]
    for rank in (0, 2):
        cause, therefore, own = printed[rank].partition("\n\nTherefore:\n\n")
        assert therefore, printed[rank]
        assert re.match(told, cause.strip()), cause
        assert own.startswith("Traceback")


BLOCK = """
from nn_parallel import ParallelExecutor, on_rank
@on_rank(0)
def save():
    raise OSError("disk full")
def train():
    with ParallelExecutor():
        save()
train()
"""


def test_no_frame_of_the_package_is_shown(tmp_path: Path) -> None:
    """A reader sees where the block and the failing line are, and nothing between them."""
    (script := tmp_path / "script.py").write_text(BLOCK)
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for printed in [rank.communicate(timeout=60)[1].decode() for rank in ranks]:
        frames = re.findall(r'File ".*/(\w+\.py)", line \d+, in (\S+)', printed)
        assert frames == [("script.py", "<module>"), ("script.py", "train"), ("script.py", "save")]
        assert "OSError: disk full" in printed
