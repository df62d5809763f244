"""Room in a cluster: what is missing is told."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from nn_parallel import (
    LaunchError,
    ParallelExecutor,
)
from tests.support.launchers import finish

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray's own


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("sys.modules['ray'] = None", r'ImportError: engine="ray" needs Ray: pip install "nn_parallel\[ray\]"\n'),
        (
            "os.environ['RAY_ADDRESS'] = '127.0.0.1:1'",
            "There is no Ray cluster .* at RAY_ADDRESS=127.0.0.1:1: .*refused",
        ),
        (
            "os.environ |= dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='localhost', MASTER_PORT='29777')",
            "ValueError: engine='ray' does not apply here: the workers are the 1 ranks that run already",
        ),
    ],
)
def test_what_is_missing_is_told(before: str, told: str, script: Callable[[str], subprocess.Popen[str]]) -> None:
    """At once, and by what to do."""
    [(status, printed)] = finish([script(f"{before}\nParallelExecutor(engine='ray')")], 60)
    assert status == 1
    assert re.search(told, printed), printed


def test_there_is_no_room(ray_cluster: Any) -> None:
    """For another size: each call says so in its turn, until the size fits."""
    with ParallelExecutor(engine="ray", num_workers=2, devices="cpu", wait_for_resources=1) as ex:
        for call in (lambda: ex.resize(100), lambda: ex.run(int), lambda: ex.submit(int).result()):
            with pytest.raises(LaunchError, match="no room for 100 workers with 1 CPU within 1 s") as raised:
                call()
            assert raised.value.__notes__ == ["0 of 100 workers are left."]
        ex.resize(2)
        assert ex.run(int) == [0, 0]


def test_bad_input(ray_cluster: Any, executor4: ParallelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a clear error."""
    for wrong in ({"engine": "dask"}, {"engine": "ray", "placement": "x"}, {"resources_per_worker": {"CPU": 1}}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            ParallelExecutor(**wrong)
    with pytest.raises(ValueError, match="Ray chooses them"):
        ParallelExecutor(engine="ray", devices="0,1")
    with pytest.raises(LaunchError, match="no room for 2 workers with 1 CPU and 1 GPU within 1 s.*has 8 CPU"):
        ParallelExecutor(engine="ray", num_gpus=2, wait_for_resources=1)
