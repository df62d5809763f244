"""The examples in docs run, each by Python or by torchrun, and reach what they state."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.paths import EXAMPLES
from tests.support.ranks import free_port

DIGITS = EXAMPLES / "digits.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def _torchrun(ranks: int, example: Path = DIGITS) -> list[str]:
    return [*TORCHRUN, f"--nproc-per-node={ranks}", f"--master-port={free_port()}", str(example)]


@pytest.mark.slow
def test_digits_on_one_rank(tmp_path: Path) -> None:
    """At least 95 % of the 360 held-out digits, each counted once.

    `tests/launchers` starts the same file by every launcher, and the README by Python on two ranks.
    """
    done = subprocess.run(
        [sys.executable, str(DIGITS), "--ranks=1"],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"(\d+) of 360 held-out digits are right: .* trained on 1 ranks\n", done.stdout)
    assert said, done.stdout
    assert int(said[1]) >= 0.95 * 360
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert len(torch.load(tmp_path / "digits.pt", weights_only=True)) == 6


@pytest.mark.slow
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 1
    assert "RankError: train() failed on rank" in done.stderr
    assert "The parameters differ between the ranks" in done.stderr


def accuracy(command: list[str], folder: Path) -> tuple[float, str]:
    """What an example says that it has reached, and all that it printed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (reached,) = re.findall(r"^(?:best )?accuracy ([\d.]+)%", done.stdout, re.MULTILINE)  # once, from rank 0
    return float(reached), done.stdout + done.stderr


def started(example: str, how: str, *arguments: str) -> list[str]:
    script = EXAMPLES / example
    return [sys.executable, str(script), *arguments] if how == "python" else [*_torchrun(2, script), *arguments]


@pytest.mark.slow
def test_federated(tmp_path: Path) -> None:
    """Three clients with digits of their own reach 85 % together; the status of every rank is told once."""
    reached, said = accuracy(started("federated.py", "python"), tmp_path)
    assert reached >= 85
    assert [f"'rank': {rank}," in said for rank in range(3)] == [True, True, False]
    assert re.findall(r"round (\d): (\d) clients", said) == [("0", "1"), ("1", "1"), ("2", "2"), ("3", "3")]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_federated_with_several_ranks_for_each_client_or_one_for_all(ranks: int, tmp_path: Path) -> None:
    """Four ranks: two clients at a time, each by DDP; one: a single process, one client after another."""
    reached, said = accuracy(started("federated.py", "python", f"--ranks={ranks}"), tmp_path)
    assert reached >= 85
    assert len(set(re.findall(r"'team': (\d)", said))) == (2 if ranks == 4 else 1)


@pytest.mark.slow
def test_energy_model_goes_on_where_it_was(tmp_path: Path) -> None:
    """93 % in two halves, the second resumed by another wrapper: one process, whose checkpoint has no DDP in it."""
    accuracy(started("energy_model.py", "torchrun", "--epochs=3"), tmp_path)
    reached, said = accuracy(started("energy_model.py", "python", "--epochs=6", "--resume", "--no-ddp"), tmp_path)
    assert reached >= 93
    assert re.findall(r"epoch (\d+):", said) == [str(epoch) for epoch in range(3, 6)]
    assert float(re.findall(r"digits told from noise ([\d.]+)%", said)[0]) >= 90


@pytest.mark.slow
def test_utilities(tmp_path: Path) -> None:
    """An ensemble of one model per device, 93 %; rank 0 alone has saved it."""
    reached, said = accuracy(started("utilities.py", "torchrun"), tmp_path)
    assert reached >= 93
    assert said.count("saved 2 models") == 1
    assert len(torch.load(tmp_path / "ensemble.pt", weights_only=True)) == 2


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    """93 % as its YAML file says: rank 0 validates, decides for all when to stop, and logs with its rank."""
    reached, said = accuracy(started("trainer.py", "python"), tmp_path)
    assert reached >= 93
    validated = re.findall(r"^(\[rank 0\] ).* INFO trainer: epoch (\d+): validation loss", said, re.MULTILINE)
    assert [int(epoch) for _, epoch in validated] == list(range(len(validated)))
    assert len(validated) < 30
    assert f"stopped early, after epoch {len(validated) - 1}" in said
    assert (tmp_path / "model_0.pt").exists()


@pytest.mark.slow
def test_trainer_needs_its_section(tmp_path: Path) -> None:
    """A configuration without ``parallel`` is an error before anything starts."""
    (tmp_path / "bad.yaml").write_text("training: {}")
    command = [sys.executable, str(EXAMPLES / "trainer.py"), "bad.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "bad.yaml has no section 'parallel'.\n")


@pytest.mark.slow
def test_engine(tmp_path: Path) -> None:
    """93 % on two ranks with mixed precision and averaged weights; the best and the last state are saved."""
    options = ["--world-size=2", "--use-amp", "--use-ema", "--epochs=5"]
    reached, _ = accuracy(started("engine.py", "torchrun", *options), tmp_path)
    assert reached >= 93
    best, last = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("best", "last"))
    assert len(last["random_states"]) == 2
    assert len(last["history"]) == 5
    assert best["history"][-1]["accuracy"] == max(epoch["accuracy"] for epoch in last["history"])
