"""`save_checkpoint(asynchronous=True)`: training goes on meanwhile, and a failure is raised where it is waited for."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import (
    ParallelExecutor,
    RankError,
    RankTimeoutError,
    all_gather_tensor,
    any_rank,
    barrier,
    cleanup_ddp,
    current_world,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_model,
    save_checkpoint,
)
from tests.support.ranks import Ranks, free_port, launched

Run = Callable[..., list[Any]]
KINDS = [("ddp", False), ("fsdp", False), ("fsdp", True)]


@pytest.fixture(params=["pool", "launched"])
def run(request: pytest.FixtureRequest, executor2: ParallelExecutor, ranks3: Ranks) -> Run:
    runs: dict[str, Run] = {"pool": executor2.run, "launched": ranks3.run}
    return runs[request.param]


@contextlib.contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Nothing is on the disk of this rank until the event is set."""
    there, original = threading.Event(), os.fsync

    def fsync(fd: Any) -> None:
        there.wait()
        original(fd)

    os.fsync = fsync
    try:
        yield there
    finally:
        there.set()
        os.fsync = original


@contextlib.contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """Of that rank: nothing more can be written there."""
    original = os.fsync

    def fsync(fd: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if current_world().rank == rank:
        os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = original


def filled(strategy: str, value: float) -> nn.Module:
    model = prepare_model(nn.Linear(3, 5), strategy=strategy)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(path: Path) -> set[float]:
    """What the saved model holds."""
    return {value for tensor in load_checkpoint(path)["model"].values() for value in tensor.flatten().tolist()}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sharded"), KINDS)
def test_training_goes_on_while_it_is_written(run: Run, tmp_path: Path, strategy: str, sharded: bool) -> None:
    """Ranks talk and change the model meanwhile: what is saved is what it was; until then the one before is there."""
    path = tmp_path / "last.pt"

    def scenario() -> Any:
        initialize_ddp()
        model = filled(strategy, 1.0)
        save_checkpoint(path, sharded=sharded, model=model, step=1)
        fill(model, 2.0)
        with slow_disk() as there:
            save_checkpoint(path, sharded=sharded, asynchronous=True, model=model, step=2)
            fill(model, 3.0)
            total = all_gather_tensor(torch.ones(1)).sum().item()
            before = torch.load(path)["step"]
            barrier()
            there.set()
            return total == current_world().world_size, before, load_checkpoint(path)["step"], values(path)

    assert all(told == (True, 1, 2, {2.0}) for told in run(scenario))
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "last.pt.shards"][: 1 + sharded]
    assert [len(list(folder.iterdir())) for folder in tmp_path.glob("*.shards")] == [1] * sharded


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_alone_too(tmp_path: Path, strategy: str) -> None:
    """One process, in whatever it is asked to shard."""
    model = filled(strategy, 1.0)
    with slow_disk() as there:
        save_checkpoint(tmp_path / "a.pt", asynchronous=True, sharded=True, model=model)
        fill(model, 2.0)
        assert not (tmp_path / "a.pt").exists()
        there.set()
        assert values(tmp_path / "a.pt") == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("then", ["save", "load"])
def test_what_goes_wrong_is_raised_by_the_next_one(run: Run, tmp_path: Path, failing: int, then: str) -> None:
    """On every rank, with the traceback of the rank that could not write; the ranks go on with the one before."""
    path = tmp_path / "last.pt"

    def scenario() -> Any:
        initialize_ddp()
        model = filled("fsdp", 1.0)
        save_checkpoint(path, sharded=True, model=model)
        fill(model, 2.0)
        with full_disk(failing):
            save_checkpoint(path, sharded=True, asynchronous=True, model=model)
            try:
                save_checkpoint(path, sharded=True, model=model) if then == "save" else load_checkpoint(path)
                return "no error"
            except RankError as error:
                told = {rank: str(leaf) for rank, leaf in error.failures.items()}
        kept = values(path)
        fill(model, 3.0)
        save_checkpoint(path, sharded=True, asynchronous=True, model=model)
        return told, kept, values(path)

    wanted = ({failing: "[Errno 28] No space left on device"}, {1.0}, {3.0})
    for told in run(scenario):
        assert told == wanted
    assert len(list(Path(f"{path}.shards").iterdir())) == 1


def test_a_full_disk_under_the_file_itself(run: Run, tmp_path: Path) -> None:
    """Rank 0's failure is that of every rank, where no rank has a part."""

    def scenario() -> Any:
        initialize_ddp()
        with full_disk(0):
            save_checkpoint(tmp_path / "a.pt", asynchronous=True, step=1)
            with pytest.raises(RankError) as raised:
                load_checkpoint(tmp_path / "a.pt")
        return list(map(str, raised.value.failures.values())), os.listdir(tmp_path)

    assert all(told == (["[Errno 28] No space left on device"], []) for told in run(scenario))


def test_what_cannot_be_loaded_is_refused_at_once(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Before anything is written, as it is without a thread."""

    def scenario() -> str:
        with pytest.raises(RankError) as raised:
            save_checkpoint(tmp_path / "a.pt", asynchronous=True, of=Path("x"))
        return str(raised.value.failures[0])

    assert all("of is a PosixPath: a checkpoint holds numbers" in told for told in executor2.run(scenario))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("alone", [False, True])
def test_what_a_pool_has_run_is_written(executor2: ParallelExecutor, tmp_path: Path, alone: bool) -> None:
    """The file is there when the call returns: its worker may end then."""

    def scenario() -> None:
        original = os.fsync

        def fsync(fd: Any) -> None:
            time.sleep(0.2)
            original(fd)

        os.fsync = fsync
        save_checkpoint(tmp_path / "a.pt", asynchronous=True, sharded=True, model=filled("fsdp", 4.0))

    executor2.submit(scenario).result() if alone else executor2.run(scenario)
    assert (tmp_path / "a.pt").exists()
    assert values(tmp_path / "a.pt") == {4.0}


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_goes_wrong_after_it_is_in_place(executor2: ParallelExecutor, tmp_path: Path, asynchronous: bool) -> None:
    """That is an error, and takes nothing of the checkpoint away."""
    path = tmp_path / "last.pt"

    def scenario() -> Any:
        initialize_ddp()
        model, original = filled("fsdp", 1.0), os.fsync
        save_checkpoint(path, sharded=True, model=model)
        fill(model, 2.0)

        def fsync(fd: Any) -> None:
            if isinstance(fd, int) and os.path.samestat(os.fstat(fd), tmp_path.stat()):
                raise OSError(errno.EIO, "Input/output error")
            original(fd)

        os.fsync = fsync
        try:
            save_checkpoint(path, sharded=True, asynchronous=asynchronous, model=model)
            load_checkpoint(path)
        except RankError as error:
            return str(error.failures[0]), values(path)
        finally:
            os.fsync = original

    assert executor2.run(scenario) == [("[Errno 5] Input/output error", {2.0})] * 2


@pytest.mark.slow
def test_the_ranks_of_a_run_that_fails_live_on(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """Though one of them is writing, and goes on with that."""

    def scenario() -> None:
        initialize_ddp()
        model, original, writes = filled("fsdp", 1.0), os.fsync, threading.Event()

        def fsync(fd: Any) -> None:
            writes.set()
            time.sleep(3)
            os.fsync = original
            original(fd)

        os.fsync = fsync
        save_checkpoint(tmp_path / "a.pt", sharded=True, asynchronous=True, model=model)
        writes.wait()
        barrier()
        if current_world().rank == 1:
            raise ValueError("bad batch")
        barrier()

    before = executor2.run(os.getpid)
    with pytest.raises(RankError, match="bad batch"):
        executor2.run(scenario)
    assert executor2.run(os.getpid) == before


@pytest.mark.slow
def test_a_group_that_was_destroyed_and_made_again(tmp_path: Path) -> None:
    """The group of the threads is made again, too."""

    def scenario() -> Any:
        for number in range(2):
            initialize_ddp()
            save_checkpoint(tmp_path / "a.pt", sharded=True, asynchronous=True, model=filled("fsdp", number))
            kept = values(tmp_path / "a.pt")
            dist.destroy_process_group()
        initialize_ddp()
        return kept

    with launched(2) as ranks:
        assert ranks.run(scenario) == [{1.0}] * 2


@pytest.mark.slow
def test_ctrl_c_on_one_rank_that_writes(tmp_path: Path) -> None:
    """It is a KeyboardInterrupt there, and a RankError on the others."""

    def scenario() -> Any:
        initialize_ddp()
        model = filled("fsdp", 1.0)

        def fsync(fd: Any) -> None:
            raise KeyboardInterrupt

        original = os.fsync
        if current_world().rank == 1:
            os.fsync = fsync
        try:
            save_checkpoint(tmp_path / "a.pt", sharded=True, model=model)
        except BaseException as error:
            return type(error).__name__, [str(each) for each in getattr(error, "failures", {}).values()]
        finally:
            os.fsync = original

    with launched(2) as ranks:
        first, second = ranks.run(scenario)
        ranks.run(initialize_ddp)
    assert first == ("RankError", ["KeyboardInterrupt: "])
    assert second == ("KeyboardInterrupt", [])


def test_cleanup_ddp_of_one_process_waits_for_it(tmp_path: Path) -> None:
    """Also where it has nothing else to clean up."""
    with slow_disk() as there:
        save_checkpoint(tmp_path / "a.pt", asynchronous=True, step=1)
        threading.Timer(0.2, there.set).start()
        cleanup_ddp()
    assert (tmp_path / "a.pt").exists()


@pytest.mark.slow
def test_a_save_that_is_tried_again_waits_for_the_one_before(tmp_path: Path) -> None:
    """A rank came too late, which is an error on all. What went wrong with the one before is not lost by that."""
    path = tmp_path / "last.pt"

    def scenario() -> Any:
        rank, told = initialize_ddp(timeout=1.5).rank, []
        model = filled("fsdp", 1.0)
        with full_disk(0):
            save_checkpoint(path, sharded=True, asynchronous=True, model=model)
            if rank == 1:
                time.sleep(2)  # longer than the timeout
            for _ in range(3):
                try:
                    save_checkpoint(path, asynchronous=True, sharded=True, model=model)
                except (RankError, RankTimeoutError) as error:
                    told.append(type(error).__name__)
                    os.fsync = fsync
        return told, values(path)

    fsync = os.fsync
    with launched(2) as ranks:
        assert ranks.run(scenario) == [(["RankTimeoutError", "RankError"], {1.0})] * 2


@pytest.mark.slow
def test_a_failed_block_does_not_end_the_writing_of_a_file(tmp_path: Path) -> None:
    """That needs no process group: `cleanup_ddp` waits for it."""

    def scenario() -> bool:
        rank, path = initialize_ddp().rank, tmp_path / "a.pt"
        with slow_disk() as there:
            save_checkpoint(path, asynchronous=True, step=1)
            with pytest.raises(RankError), ParallelExecutor():
                if rank == 1:
                    raise ValueError
            threading.Timer(0.3, there.set).start()
            cleanup_ddp()
        return rank != 0 or path.exists()

    with launched(2) as ranks:
        assert ranks.run(scenario) == [True, True]
        ranks.run(initialize_ddp)


NEVER_WRITTEN = """
import os, sys, threading, torch, torch.distributed as dist
from torch import nn
from nn_parallel import initialize_ddp, prepare_model, save_checkpoint
rank = initialize_ddp().rank
model = prepare_model(nn.Linear(3, 5), strategy="fsdp")
os.fsync = lambda fd: threading.Event().wait()
save_checkpoint(sys.argv[1], asynchronous=True, sharded=True, model=model)
if rank == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_disk_that_never_answers_holds_up_no_failure(tmp_path: Path) -> None:
    """Outside of all blocks: the ranks end at once, though their threads write."""
    (script := tmp_path / "script.py").write_text(NEVER_WRITTEN)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "a.pt"],
            env=os.environ | place | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all("ValueError: bad batch" in each for each in told)
    assert "The last checkpoint could not be saved." in told[0]
    assert "The last checkpoint could not be saved." not in told[1]
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.slow
def test_blocks_fail_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """At the path is the one before, or the new one; all go on."""
    path = tmp_path / "last.pt"

    def scenario(seconds: float) -> tuple[list[int], list[str]]:
        chance, own_chance = random.Random(5), random.Random(current_world().rank)
        model, kept, saved, original = filled("fsdp", 1.0), [], 0, os.fsync

        def fsync(fd: Any) -> None:
            time.sleep(own_chance.choice([0, 0, 0.01, 0.03]))
            original(fd)

        os.fsync = fsync
        end = time.monotonic() + seconds
        while len(kept) < 3 or not any_rank(time.monotonic() > end):
            saved += 1
            failing, late = chance.randrange(2), chance.choice([0, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05])
            ends_after = chance.choice([0, late])
            save_checkpoint(path, asynchronous=True, sharded=True, model=model, step=saved)
            with pytest.raises(RankError), ParallelExecutor():
                if current_world().rank == failing:
                    time.sleep(late)
                    raise ValueError
                time.sleep(ends_after)
            model = filled("fsdp", 1.0)
            if saved % 3 == 0 and on_rank(0, broadcast=True)(path.exists)():
                kept.append(load_checkpoint(path)["step"])
        return kept, [thread.name for thread in threading.enumerate() if "save" in thread.name]

    with launched(2) as ranks:
        ranks.run(initialize_ddp)
        (kept, threads), second = ranks.run(scenario, 8.0)
    assert second == (kept, threads)
    assert kept == sorted(kept)
    assert kept
    assert threads == []


@pytest.mark.slow
def test_a_failure_that_torch_cannot_tell_the_others_is_told_too(run: Run, tmp_path: Path) -> None:
    """One that cannot be pickled: the threads of the other ranks wait for it in a collective."""
    path = tmp_path / "last.pt"

    def scenario() -> Any:
        initialize_ddp()
        model = filled("fsdp", 1.0)
        save_checkpoint(path, sharded=True, model=model)

        class NotByName(OSError): ...

        def fsync(fd: Any) -> None:
            raise NotByName("the disk is gone")

        original = os.fsync
        if current_world().rank == 1:
            os.fsync = fsync
        save_checkpoint(path, sharded=True, asynchronous=True, model=model)
        try:
            load_checkpoint(path)
            return "no error"
        except RankError as error:
            told = {rank: str(leaf) for rank, leaf in error.failures.items()}
        finally:
            os.fsync = original
        return told, values(path)

    for told, kept in run(scenario):
        assert list(told) == [1]
        assert "NotByName" in told[1]
        assert kept == {1.0}


@pytest.mark.slow
def test_a_number_in_a_sharded_tensor_is_copied(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """One of no dimension, which torch leaves as it is when it copies."""

    def scenario() -> Any:
        from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

        initialize_ddp()
        number = distribute_tensor(torch.tensor(1.0), init_device_mesh("cpu", (2,)), [Replicate()])
        with slow_disk() as there:
            save_checkpoint(tmp_path / "a.pt", sharded=True, asynchronous=True, number=number)
            number.to_local().fill_(2.0)
            barrier()
            there.set()
            return load_checkpoint(tmp_path / "a.pt")["number"].item()

    assert executor2.run(scenario) == [1.0, 1.0]


@pytest.mark.slow
def test_the_ranks_go_on_without_one_that_died(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed before its part was written: the new rank in its place loads the checkpoint before, as the others do."""
    path = tmp_path / "last.pt"

    def begin() -> None:
        initialize_ddp()
        model = filled("fsdp", 1.0)
        save_checkpoint(path, sharded=True, model=model)
        fill(model, 2.0)
        with slow_disk() as there:
            save_checkpoint(path, sharded=True, asynchronous=True, model=model)
            if current_world().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            there.set()
            prepare_model(nn.Linear(1, 1))

    def go_on() -> Any:
        told = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("nn_parallel").addHandler(handler)
        try:
            return values(path), told
        finally:
            logging.getLogger("nn_parallel").removeHandler(handler)

    with ParallelExecutor(num_workers=2, devices="cpu") as pool:
        with pytest.raises(RankError, match="SIGKILL"):
            pool.run(begin)
        first, second = pool.run(go_on)
    assert first == ({1.0}, ["The previous checkpoint was not saved, because ranks failed while it was being written."])
    assert second == ({1.0}, [])


@pytest.mark.slow
def test_leaving_the_others_waits_for_it(tmp_path: Path) -> None:
    """`cleanup_ddp` closes the process group only when the threads need it no longer."""

    def scenario() -> bool:
        rank, path = initialize_ddp().rank, tmp_path / "a.pt"
        with slow_disk() as there:
            save_checkpoint(path, asynchronous=True, sharded=True, model=filled("fsdp", 4.0))
            threading.Timer(0.3, there.set).start()
            cleanup_ddp()
        return rank != 0 or path.exists()

    with launched(2) as ranks:
        assert ranks.run(scenario) == [True, True]
        ranks.run(initialize_ddp)
    assert values(tmp_path / "a.pt") == {4.0}


IN_A_GROUP_OF_ITS_OWN = """
import os, sys, threading, torch, torch.distributed as dist
from torch import nn
from nn_parallel import cleanup_ddp, prepare_model, save_checkpoint
dist.init_process_group("gloo")
fsync, there = os.fsync, threading.Event()
def late(fd):
    there.wait()
    fsync(fd)
os.fsync = late
model = prepare_model(nn.Linear(3, 5), strategy="fsdp")
save_checkpoint(sys.argv[1], asynchronous=True, sharded=True, model=model, step=7)
threading.Timer(0.3, there.set).start()
cleanup_ddp()
assert dist.is_initialized()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_group_that_other_code_has_made(tmp_path: Path) -> None:
    """`cleanup_ddp` waits, and leaves the group to the code that made it."""
    (script := tmp_path / "script.py").write_text(IN_A_GROUP_OF_ITS_OWN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run([*command, tmp_path / "a.pt"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "could not be saved" not in done.stderr
    assert load_checkpoint(tmp_path / "a.pt")["step"] == 7


AT_EXIT = """
import os, sys, torch
from nn_parallel import save_checkpoint
fsync = os.fsync
def late(fd):
    import time
    time.sleep(0.3)
    if sys.argv[2:]:
        raise OSError("the disk is gone")
    fsync(fd)
os.fsync = late
save_checkpoint(sys.argv[1], asynchronous=True, step=7, weights=torch.ones(100_000))
if os.fork() == 0:
    sys.exit()  # of a fork, which writes nothing
os.wait()
"""


@pytest.mark.slow
def test_the_end_of_a_script_waits_for_it(tmp_path: Path) -> None:
    """What goes wrong there has nobody to catch it: it is logged."""
    (script := tmp_path / "script.py").write_text(AT_EXIT)
    for arguments, told in (([], ""), (["fails"], "The last checkpoint could not be saved.")):
        path = tmp_path / f"{len(arguments)}.pt"
        done = subprocess.run([sys.executable, script, path, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert told in done.stderr
        assert ("OSError: the disk is gone" in done.stderr) == path.name.startswith("1")
        assert path.exists() != bool(arguments)
    assert load_checkpoint(tmp_path / "0.pt")["step"] == 7
