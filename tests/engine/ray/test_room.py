"""Room in a cluster: what is missing is told, and nodes have the workers; also with addresses of their own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nn_parallel import LaunchError, ParallelExecutor
from tests.support import laboratory
from tests.support.laboratory import Node
from tests.support.launchers import PYTHON, environ, finish, popen, run, torchrun, wait_for_files
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray's own
RAY = str(Path(PYTHON).with_name("ray"))
DIGITS = EXAMPLES / "digits.py"
TOKEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
GONE_WITHIN_S, ENDS_SOON_S = 5.0, 30.0
BEGIN = """
import json, os, socket, sys, time, torch, torch.distributed as dist
from nn_parallel import *

def world():
    here, number = initialize_ddp(), torch.ones(1)
    dist.all_reduce(number)
    return socket.gethostname(), here.rank, here.local_rank, here.node_rank, here.local_world_size, number.item()
"""


@pytest.fixture
def ray_nodes(tmp_path: Path, _nothing_left_behind: None) -> Iterator[list[Node]]:
    """Two nodes with two CPUs each, and one that is none of them."""
    if not laboratory.is_possible():
        pytest.skip("needs root and iproute2, to make namespaces")
    with laboratory.laboratory(tmp_path, 3) as nodes:
        for node in nodes:
            own = "mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && mount -t tmpfs none /dev/shm"
            subprocess.run(node.command(["sh", "-c", own]), check=True, timeout=10)
        head = ["--head", "--port=6379", "--include-dashboard=false"]
        for node, where in ((nodes[0], head), (nodes[1], [f"--address={nodes[0].address}:6379"])):
            options = [f"--node-ip-address={node.address}", "--num-cpus=2", "--object-store-memory=100000000"]
            run(node.command([RAY, "start", *where, *options]), environ(**TOKEN), tmp_path)
        yield nodes


def script_in(folder: Path, text: str) -> list[str]:
    (folder / "script.py").write_text(BEGIN + text)
    return [PYTHON, str(folder / "script.py"), str(folder)]


@contextlib.contextmanager
def client_server(node: Node, folder: Path) -> Iterator[str]:
    """The address of a server of Ray for one client. Ray's own for many starts such a one for each, and not always."""
    options = [f"--address={node.address}:6379", f"--host={node.address}", "--port=10002", "--mode=specific-server"]
    server = popen(node.command([PYTHON, "-m", "ray.util.client.server", *options]), environ(**TOKEN), folder)
    try:
        deadline = time.monotonic() + ENDS_SOON_S
        listens = node.command(["bash", "-c", f"exec 3<>/dev/tcp/{node.address}/10002"])
        while subprocess.run(listens, stderr=subprocess.DEVNULL).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.1)  # between two looks
        yield f"ray://{node.address}:10002"
    finally:
        finish([server], 0)


def test_a_script_on_another_machine(ray_nodes: list[Node], tmp_path: Path) -> None:
    """By Ray's client: functions go by value, prints come back, and failures of a node are told as on one machine."""
    text = """
def fail():
    if initialize_ddp().rank == 3:
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(1))

def hello(device):
    print("hello from", current_world().rank)

with ParallelExecutor(engine="ray", num_workers=4, prefix_output=True) as ex:
    found = {"world": ex.run(world), "argv": ex.run(lambda: sys.argv[1:])}
    try:
        ex.run(fail)
    except RankError as error:
        found["failed"] = {rank: repr(each) for rank, each in error.failures.items()}
    found["again"] = ex.run(world)
    numbers = ex.put(torch.arange(1 << 20))
    found["sums"] = ex.run(lambda numbers: numbers.sum().item(), numbers)
    found["mapped"] = list(ex.map(lambda number: number ** 2, range(5)))
    ex.run(hello)
    time.sleep(2)  # Ray brings what is printed when it likes
open(sys.argv[1] + "/found", "w").write(json.dumps(found))
"""
    with client_server(ray_nodes[0], tmp_path) as address:
        printed = run(ray_nodes[2].command(script_in(tmp_path, text)), environ(RAY_ADDRESS=address, **TOKEN), tmp_path)
    found = json.loads((tmp_path / "found").read_text())
    names = [place[0] for place in found["world"]]
    assert sorted(set(names)) == ["node1", "node2"]
    expected = [[name, rank, rank % 2, rank // 2, 2, 4.0] for rank, name in enumerate(names)]
    assert found["world"] == found["again"] == expected
    assert found["argv"] == [[str(tmp_path)]] * 4
    assert found["failed"] == {"3": "ValueError('a bad batch')"}
    assert found["sums"] == [sum(range(1 << 20))] * 4
    assert found["mapped"] == [0, 1, 4, 9, 16]
    assert sorted(re.findall(r"\[rank (\d)\] hello from \1\n", printed)) == list("0123"), printed


def test_a_node_is_killed(ray_nodes: list[Node], tmp_path: Path) -> None:
    """In a collective: the script is told within seconds, long before Ray misses the node, and goes on on the other."""
    text = """
def add_up():
    here = initialize_ddp()
    open(f"{sys.argv[1]}/{here.rank}.ready", "w").close()
    while True:
        dist.all_reduce(torch.ones(1))

with ParallelExecutor(engine="ray", num_workers=4) as ex:
    places = ex.run(world)
    try:
        ex.run(add_up)
    except RankError as error:
        found = {"at": time.time(), "failed": {rank: type(each).__name__ for rank, each in error.failures.items()}}
    found["there"] = [place[1] for place in places if place[0] == "node2"]
    ex.resize(2)
    found["after"] = ex.run(world)
open(sys.argv[1] + "/found", "w").write(json.dumps(found))
"""
    address = f"{ray_nodes[0].address}:6379"
    process = popen(ray_nodes[0].command(script_in(tmp_path, text)), environ(RAY_ADDRESS=address, **TOKEN), tmp_path)
    wait_for_files(tmp_path, "*.ready", 4)
    killed_at = time.time()
    ray_nodes[1].is_off = True
    os.kill(ray_nodes[1].pid, signal.SIGKILL)
    [(status, printed)] = finish([process])
    assert status == 0, printed
    found = json.loads((tmp_path / "found").read_text())
    assert found["failed"] == {str(rank): "WorkerDiedError" for rank in found["there"]}
    assert found["at"] - killed_at < GONE_WITHIN_S
    assert found["after"] == [["node1", rank, rank, 0, 2, 2.0] for rank in range(2)]
    deadline = time.monotonic() + ENDS_SOON_S
    while (left := our_processes(ray_nodes[0])) and time.monotonic() < deadline:
        time.sleep(0.1)  # between two looks
    assert not left


def our_processes(node: Node) -> list[str]:
    return [line for line in node.processes() if "WorkerActor" in line or "Orders" in line]


@pytest.mark.timeout(300)
def test_digits_comes_out_as_under_torchrun(ray_nodes: list[Node], tmp_path: Path) -> None:
    """One epoch on four ranks: the same parameters within 1e-6."""
    digits = [str(DIGITS), "--epochs=1", f"--out={tmp_path / 'torchrun'}"]
    run(torchrun()(4, digits), environ(), tmp_path)
    command = [PYTHON, str(DIGITS), "--engine=ray", "--ranks=4", "--epochs=1", f"--out={tmp_path / 'ray'}"]
    run(ray_nodes[0].command(command), environ(RAY_ADDRESS=f"{ray_nodes[0].address}:6379", **TOKEN), tmp_path)
    expected, found = (torch.load(tmp_path / name / "digits.pt", weights_only=True) for name in ("torchrun", "ray"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=f"{key} differs")


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


def test_bad_input(ray_cluster: Any) -> None:
    """Each with a clear error."""
    for wrong in ({"engine": "dask"}, {"engine": "ray", "placement": "x"}, {"resources_per_worker": {"CPU": 1}}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            ParallelExecutor(**wrong)
    with pytest.raises(ValueError, match="Ray chooses the devices"):
        ParallelExecutor(engine="ray", devices="0,1")
    with pytest.raises(LaunchError, match="no room for 2 workers with 1 CPU and 1 GPU within 1 s.*has 8 CPU"):
        ParallelExecutor(engine="ray", num_gpus=2, wait_for_resources=1)


def test_it_waits_for_room(ray_cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It says so after some seconds, and begins when others give room back."""
    taken = ParallelExecutor(engine="ray", num_workers=2, devices="cpu", resources_per_worker={"CPU": 4})
    taken.run(int)
    timer = threading.Timer(7, taken.shutdown)
    timer.start()
    with caplog.at_level(logging.WARNING), ParallelExecutor(engine="ray", num_workers=2, devices="cpu") as ex:
        assert ex.run(int) == [0, 0]
    timer.join()
    assert "Waiting for Ray to find room for 2 workers with 1 CPU: the cluster has 8 CPU" in caplog.text


def test_another_size_gives_room_back(ray_cluster: Any) -> None:
    """To other users of the cluster, at once; the pool does what was asked of it before and after."""
    half_of_a_node = {"CPU": 2}
    with ParallelExecutor(engine="ray", num_workers=4, devices="cpu", resources_per_worker=half_of_a_node) as ex:
        before = ex.submit(abs, -1)
        ex.resize(2)
        assert before.result() == 1
        assert ex.run(int) == [0, 0]
        with ParallelExecutor(
            engine="ray", num_workers=2, devices="cpu", resources_per_worker=half_of_a_node, wait_for_resources=30
        ) as other:
            assert other.run(int) == [0, 0]
        ex.resize(3)
        assert ex.run(int) == [0, 0, 0]
