"""Platforms that start a script several times, and leave it to the script which of them it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


def started_with_others(environ: Mapping[str, str]) -> str | None:
    """What says that this process is one of several, where no launcher has told them their ranks; and what to do."""
    for platform in _PLATFORMS:
        if (text := environ.get(platform.variable)) and platform.is_of_several(text):
            what = f"{platform.variable}={text}, so {platform.name} has started this script several times"
            return f"{what}. {platform.advice}"
    return None


class _Platform(NamedTuple):
    variable: str
    name: str
    is_of_several: Callable[[str], bool]
    advice: str


def _is_above_1(text: str) -> bool:
    first = text.partition(":")[0]  # of 2:4, from two to four
    return first.isdecimal() and int(first) > 1


_BY_ESTIMATOR = 'Give the estimator distribution={"torch_distributed": {"enabled": True}}.'
_PLATFORMS = (
    _Platform("SM_HOSTS", "SageMaker", lambda hosts: "," in hosts, _BY_ESTIMATOR),
    _Platform("PET_NNODES", "Kubeflow", _is_above_1, "Start it there by torchrun."),
    _Platform("PBS_TASKNUM", "pbsdsh", _is_above_1, "Start it by mpirun, or torchrun."),  # 1: the batch script
    _Platform("LSF_PM_TASKID", "blaunch", bool, "Start it by mpirun, jsrun or torchrun."),
)
