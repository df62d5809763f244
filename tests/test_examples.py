"""The examples in docs run however they are started, and reach what they state."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import free_port

DIGITS = Path(__file__).parent.parent / "docs" / "examples" / "digits.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def _torchrun(ranks: int) -> list[str]:
    return [*TORCHRUN, f"--nproc-per-node={ranks}", f"--master-port={free_port()}", str(DIGITS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        (lambda: [sys.executable, str(DIGITS), "--ranks=2"], 2),
        (lambda: _torchrun(2), 2),
        (lambda: [sys.executable, str(DIGITS), "--ranks=1"], 1),
        (lambda: _torchrun(1), 1),
    ],
    ids=["python-2", "torchrun-2", "python-1", "torchrun-1"],
)
def test_digits(start: object, ranks: int, tmp_path: Path) -> None:
    """At least 95 % of the 360 held-out digits, each counted once; the example itself checks the parameters' hash."""
    assert callable(start)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        start(), capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"(\d+) of (\d+) held-out digits are right: .* trained on (\d+) ranks\n", done.stdout)
    assert said, done.stdout
    right, evaluated, trained_on = map(int, said.groups())
    assert (evaluated, trained_on) == (360, ranks)
    assert right >= 0.95 * 360
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert len(torch.load(tmp_path / "digits.pt", weights_only=True)) == 6


def test_digits_notices_ranks_that_disagree(tmp_path: Path) -> None:
    """Its check of the hash can fail: a rank with another weight stops the training with an error that names it."""
    code = DIGITS.read_text()
    spoilt = code.replace(
        "        check_ranks_agree(model.module)\n",
        "        model.module[-1].bias.data += 1e-6 * rank\n        check_ranks_agree(model.module)\n",
    )
    assert spoilt != code
    (tmp_path / "spoilt.py").write_text(spoilt)
    command = [sys.executable, "spoilt.py", "--ranks=2", "--epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 1
    assert "RankError: train() failed on rank" in done.stderr
    assert "The parameters differ between the ranks" in done.stderr
