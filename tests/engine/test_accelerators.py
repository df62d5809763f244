"""Failures on a made-up accelerator, of the folder stand_in. Those on real GPUs are in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nn_parallel import ParallelExecutor, RankError, cleanup_ddp, initialize_ddp
from tests.support.paths import STAND_IN
from tests.support.ranks import Ranks, free_port, launched

PATH = os.pathsep.join([STAND_IN, *sys.path])


def printed(script: str, **environ: str) -> str:
    """Return what a script prints in a process that has the stand-in; so have its workers."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": PATH} | environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    """Two ranks on a stand-in each."""
    with launched(2, PYTHONPATH=PATH) as ranks:
        yield ranks


IN_A_POOL = """
    import os
    import stand_in_accelerator as accelerator
    from nn_parallel import ParallelExecutor, RankError

    def fail_later(device, item=0):
        if item == 2:
            accelerator.failure = "a late failure"

    def break_for_good(device):
        accelerator.is_broken = True

    with ParallelExecutor(devices=[0]) as pool:
        {}
"""


def in_a_pool(body: str) -> str:
    return printed(IN_A_POOL.format(textwrap.indent(textwrap.dedent(body), " " * 8).strip()))


@pytest.mark.slow
def test_what_fails_late_fails_the_task_that_queued_it() -> None:
    """And not the next one, which may be somebody else's; the worker goes on, and gives back what it holds."""
    told = in_a_pool(
        """
        [before] = pool.run(os.getpid)
        try:
            pool.run(fail_later, 2)
        except RankError as error:
            print(error.failures[0])
        print(pool.run(os.getpid) == [before], pool.run(lambda: accelerator.calls))
        """
    )
    assert told.splitlines() == ["a late failure", "True [['empty_cache']]"]


@pytest.mark.slow
def test_what_fails_late_fails_its_item_of_a_map() -> None:
    """The items before it have their results."""
    told = in_a_pool(
        """
        results = pool.map(fail_later, range(4), chunksize=4)
        print(next(results), next(results))
        try:
            next(results)
        except RuntimeError as error:
            print(error)
        """
    )
    assert told.splitlines() == ["None None", "a late failure"]


@pytest.mark.slow
def test_a_worker_whose_accelerator_is_lost_is_replaced() -> None:
    """As after an assertion in a kernel of CUDA: it tells of the failure, and leaves; the next task succeeds."""
    told = in_a_pool(
        """
        for call in (pool.run, lambda fn: list(pool.map(lambda device, _: fn(device), [1]))):
            [before] = pool.run(os.getpid)
            try:
                call(break_for_good)
            except Exception as error:
                print(type(error).__name__, "earlier failure" in str(error))
            print(pool.run(lambda device: str(device)), pool.run(os.getpid) == [before])
        """
    )
    replaced = "['stand_in:0'] False"
    assert told.splitlines() == ["RankError True", replaced, "RuntimeError True", replaced]


FORKS = """
    import os, sys
    import torch, torch.distributed as dist
    from nn_parallel import *

    for case in {cases}:
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0, case
        else:
            {body}
            sys.stdout.flush()
            os._exit(0)
"""


def in_forks(cases: list[Any], body: str) -> list[str]:
    """Return what ``body`` prints for each case, in a process of its own; torch is imported once for all of them."""
    script = textwrap.dedent(FORKS).format(cases=cases, body=textwrap.indent(textwrap.dedent(body), " " * 8).strip())
    return printed(script).splitlines()


@pytest.mark.slow
def test_what_begins_no_use_of_the_accelerator(tmp_path: Path) -> None:
    """In the process of the script: there it would take memory, and a fork could not use it any more."""
    calls = [
        "current_world()",
        "resolve_device('cuda')",
        "on_rank(0)(int)()",
        "seed_everything(0)",
        "reduce_metrics({'a': 1})",
        "initialize_ddp()",
        "ParallelExecutor(devices='cuda').__enter__().run(int)",
        f"initialize_ddp(device='cpu'), save_checkpoint({str(tmp_path / 'checkpoint.pt')!r}, epoch=1)",
    ]
    used = in_forks([*calls, "torch.stand_in.current_device_index()"], "eval(case)\nprint(torch.stand_in.is_in_use)")
    assert used == ["False"] * len(calls) + ["True"]


def _join() -> Any:
    world = initialize_ddp(30, backend="stand_in_ccl")
    assert world.device.type == "stand_in"
    return world


def _waits_while_the_other_fails(groups: int) -> tuple[list[str], list[Any]]:
    """Return what rank 0 did after its collective, and what was called of the stand-in."""
    import stand_in_accelerator as accelerator

    world, went_on = _join(), list[str]()
    others = [dist.new_group([0, 1], backend="stand_in_ccl") for _ in range(groups - 1)]
    accelerator.calls.clear()
    with pytest.raises(RankError, match="a bad batch"), ParallelExecutor():
        if world.rank == 1:
            raise ValueError("a bad batch")
        for group in others:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.all_reduce(torch.ones(1))
        went_on.append("with wrong numbers")
    return went_on, accelerator.calls


@pytest.mark.parametrize("groups", [1, 2])
def test_a_freed_rank_does_not_go_on_with_wrong_numbers(groups: int, ranks2: Ranks) -> None:
    """It is interrupted before the groups are aborted, all of them at the same time; nothing is raised by those."""
    for _ in range(3):
        for went_on, calls in ranks2.run(_waits_while_the_other_fails, groups):
            assert went_on == []
            assert calls == ["abort"] * groups


def _sees_an_error(where: str, kind: str) -> str:
    import stand_in_accelerator as accelerator

    world = _join()
    accelerator.ProcessGroup.made[-1].error = accelerator.ErrorType[kind]
    try:
        with ParallelExecutor() if where == "in a block" else open(os.devnull):
            if world.rank == 0:
                dist.all_reduce(torch.ones(1))
            else:
                accelerator.idle.clear()
                time.sleep(20)
            return "it went on"
    except (RankError, dist.DistBackendError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("where", ["in a block", "outside"])
@pytest.mark.parametrize(
    ("kind", "text"), [("COMM_ERROR", "Connection closed by peer"), ("TIMEOUT", "Timed out waiting")]
)
def test_an_error_of_the_backend_is_raised(where: str, kind: str, text: str, ranks2: Ranks) -> None:
    """The backend raises nothing itself: the rank would go on with wrong numbers, or its process would be ended."""
    answers = ranks2.run(_sees_an_error, where, kind)
    ranks2.run(cleanup_ddp)  # not before both have seen the error, because the error of one that has left counts less
    for told in answers:
        assert told.startswith("RankError" if where == "in a block" else "DistBackendError")
        assert text in told


@pytest.mark.slow
def test_an_error_where_all_has_ended_is_none(ranks2: Ranks) -> None:
    """The other rank has closed the connection at its end: no false alarm."""

    def body() -> str:
        import stand_in_accelerator as accelerator

        _join()
        accelerator.ProcessGroup.made[-1].error = accelerator.ErrorType.COMM_ERROR
        with ParallelExecutor():
            time.sleep(1.5)
        time.sleep(1.5)
        cleanup_ddp()
        return "all is well"

    assert ranks2.run(body) == ["all is well"] * 2


@pytest.mark.slow
def test_a_cancelled_task_does_not_go_on_with_wrong_numbers(tmp_path: Path) -> None:
    """Nor does that of a rank in a pool; its process stays."""
    told = printed(
        f"""
        import os, torch, pathlib, torch.distributed as dist
        from nn_parallel import ParallelExecutor, RankError, initialize_ddp, current_world

        def body(device):
            world = initialize_ddp(30, backend="stand_in_ccl")
            if world.rank == 1:
                raise ValueError("a bad batch")
            dist.all_reduce(torch.ones(1))
            pathlib.Path({str(tmp_path)!r}, "went_on").touch()

        with ParallelExecutor(devices=[0, 1]) as pool:
            before = pool.run(os.getpid)
            for _ in range(3):
                try:
                    pool.run(body)
                except RankError as error:
                    print(error.failures)
            print(pool.run(os.getpid) == before)
        """
    )
    assert told.splitlines() == ["{1: ValueError('a bad batch')}"] * 3 + ["True"]
    assert not (tmp_path / "went_on").exists()


UNCAUGHT = """
import sys, torch, torch.distributed as dist
from nn_parallel import initialize_ddp
initialize_ddp(600, backend="stand_in_ccl")
dist.all_reduce(torch.ones(1), async_op=True)
sys.stdin.readline()
raise ValueError("nobody catches this")
"""


@pytest.mark.slow
def test_an_uncaught_exception_ends_a_process_with_a_collective_under_way() -> None:
    """It is not waited for, as nobody may match it: the limit of the group is ten minutes."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": PATH}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", UNCAUGHT],
            env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        _, told = ranks[1].communicate("go\n", timeout=20)  # rank 0 would keep its store open for the other rank
        assert (ranks[1].returncode, "nobody catches this" in told) == (1, True)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_cleanup_waits_for_what_is_under_way(ranks2: Ranks) -> None:
    """A rank that leaves while its last collective is not over yet ends that by no abort."""

    def body() -> list[Any]:
        import threading

        import stand_in_accelerator as accelerator

        _join()
        accelerator.calls.clear()
        accelerator.idle.clear()
        threading.Timer(1.0, accelerator.idle.set).start()
        cleanup_ddp()
        return [accelerator.idle.is_set(), accelerator.calls]

    assert ranks2.run(body) == [[True, []]] * 2


@pytest.mark.slow
def test_ranks_on_the_cpu_stay_there(tmp_path: Path) -> None:
    """Whatever accelerator this machine has: torch would take that for the mesh of FSDP."""
    told = printed(
        """
        import torch
        from nn_parallel import ParallelExecutor, prepare_model

        def body():
            model = prepare_model(torch.nn.Linear(2, 2), strategy="fsdp")
            return {parameter.device.type for parameter in model.parameters()}

        with ParallelExecutor(num_workers=2, devices="cpu") as pool:
            print(pool.run(body))
        """
    )
    assert told == "[{'cpu'}, {'cpu'}]"


@pytest.mark.slow
def test_the_device_of_a_rank_that_other_code_has_made() -> None:
    """The one that its group is bound to, else one that was made the current one, else that of the local rank."""
    cases = [(0, None, 1, 1), (0, 0, 1, 0), (1, None, 0, 1), (0, None, 5, 0)]
    body = """
        current, bound, local_rank, _ = case
        if current:
            torch.accelerator.set_device_index(current)
        dist.init_process_group("stand_in_ccl", store=dist.HashStore(), rank=local_rank, world_size=8)
        if bound is not None:
            dist.group.WORLD.bound_device_id = torch.device("stand_in", bound)  # as init does for torch's own
        print(current_world().device)
    """
    assert in_forks(cases, body) == [f"stand_in:{expected}" for *_, expected in cases]
