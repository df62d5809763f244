"""Platforms that start a script several times and set no rank: a warning, where one is due."""

from __future__ import annotations

import re

import pytest

from nn_parallel._engine.ranks.environment import detect_launch
from nn_parallel._engine.ranks.platforms import started_with_others

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "3"}


SEVERAL = {
    "SageMaker without a distribution": ({"SM_HOSTS": '["algo-1","algo-2"]'}, "torch_distributed"),
    "Kubeflow Trainer v2": ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NNODES=2, so Kubeflow .* by torchrun"),
    "an elastic Kubeflow": ({"PET_NNODES": "2:4"}, "PET_NNODES=2:4"),
    "pbsdsh": ({"PBS_JOBID": "7", "PBS_TASKNUM": "2"}, "PBS_TASKNUM=2, so pbsdsh .* by mpirun, or torchrun"),
    "blaunch": ({"LSB_JOBID": "7", "LSF_PM_TASKID": "1"}, "LSF_PM_TASKID=1, so blaunch"),
}


ALONE = {
    "SageMaker, one host": {"SM_HOSTS": '["algo-1"]'},
    "Kubeflow, one node": {"PET_NNODES": "1"},
    "a batch script of PBS": {"PBS_JOBID": "7", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"},
    "a batch script of LSF": {"LSB_JOBID": "7", "LSB_HOSTS": "a b", "LSB_MCPU_HOSTS": "a 1 b 1"},
    "a batch script of SLURM": BATCH,
}


@pytest.mark.parametrize(("environ", "word"), SEVERAL.values(), ids=SEVERAL)
def test_who_is_one_of_several_without_a_rank_is_told(environ: dict[str, str], word: str) -> None:
    """It runs alone, since nothing says which it is, and not in silence."""
    assert detect_launch(environ) is None
    assert re.search(word, started_with_others(environ) or "")


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_who_is_alone_is_not_warned(environ: dict[str, str]) -> None:
    """Nor is a batch script on the first of several nodes."""
    assert started_with_others(environ) is None
