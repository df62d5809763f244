"""Sharded checkpoints: each rank writes and reads its part, and they load into anything, at any number of ranks."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import (
    ParallelExecutor,
    RankError,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_model,
    save_checkpoint,
    unwrap_model,
)
from nn_parallel.training._shards import DataUnpickler, new_folder
from tests.support.ranks import ANSWER_WITHIN_S, launched


class Net(nn.Module):
    """Of sizes that ranks do not share evenly, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(7), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def trained(strategy: str, seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    initialize_ddp()
    torch.manual_seed(seed)
    model = prepare_model(Net(), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All their numbers, whole."""
    values = dict(unwrap_model(model).state_dict())
    for number, own in optimizer.state_dict()["state"].items():
        values |= {f"{number}.{name}": value for name, value in own.items()}
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in values.items()}


def save(path: Path, strategy: str = "fsdp", seed: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = trained(strategy, seed)
    save_checkpoint(path, model=model, optimizer=optimizer, epoch=seed, sharded=True, **options)
    return state(model, optimizer)


def load(path: Path, strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model, optimizer = trained(strategy, seed=99, steps=1)
    rest = load_checkpoint(path, model=model, optimizer=optimizer)
    return state(model, optimizer), rest


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.fixture(scope="module")
def executors() -> Iterator[dict[int, ParallelExecutor]]:
    """Of 2 and of 3 ranks."""
    with ParallelExecutor(num_workers=2, devices="cpu") as two, ParallelExecutor(num_workers=3, devices="cpu") as three:
        yield {2: two, 3: three}


def folders(path: Path) -> set[str]:
    return {folder.name for folder in path.with_name(f"{path.name}.shards").glob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_loads_across_strategies_and_numbers_of_ranks(
    executors: dict[int, ParallelExecutor], ranks: int, tmp_path: Path
) -> None:
    """Bit for bit: sharded otherwise, in copies, alone, and as plain tensors where nothing is given to load into."""
    path = tmp_path / "last.pt"
    wanted, *_ = executors[ranks].run(save, path)
    shards = next((tmp_path / "last.pt.shards").iterdir())
    assert {file.name for file in shards.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(ranks)}
    for pool in executors.values():
        for strategy in ("fsdp", "ddp"):
            for loaded, rest in pool.run(load, path, strategy):
                assert equal(loaded, wanted)
                assert rest == {"epoch": 0}
    assert equal(load(path, "ddp")[0], wanted)
    plain = load_checkpoint(path)["model"]
    assert all(torch.equal(value, wanted[name]) for name, value in plain.items())
    other = Net()
    other.load_state_dict(plain)


def test_a_whole_checkpoint_replaces_a_sharded_one_and_back(
    executors: dict[int, ParallelExecutor], tmp_path: Path
) -> None:
    """The shards of what is replaced are removed; those that a kill has left, too; those in the making stay."""
    path = tmp_path / "last.pt"
    executors[2].run(save, path)
    first = folders(path)
    left, without_lock = (tmp_path / "last.pt.shards" / name for name in ("left", "without_lock"))
    for folder in (left, without_lock):
        folder.mkdir()
        (folder / "0.distcp").touch()
    (left / "lock").touch()
    with new_folder(path) as in_the_making:
        executors[2].run(save, path, seed=1)
        second = folders(path) - {in_the_making.name}
        assert in_the_making.exists()
    assert len(second) == 1
    assert second.isdisjoint(first)
    executors[2].run(save, path, "ddp", seed=2)
    assert folders(path) == set()
    wanted, *_ = executors[2].run(save, path, seed=3)
    assert equal(load(path, "ddp")[0], wanted)


def test_those_before_are_kept_with_their_shards(executors: dict[int, ParallelExecutor], tmp_path: Path) -> None:
    """``keep=3``: the new one and the two before; what falls out goes with its shards."""
    path = tmp_path / "last.pt"
    states = [executors[2].run(save, path, seed=seed, keep=3)[0] for seed in range(4)]
    assert len(folders(path)) == 3
    for name, wanted in zip(("last.pt", "last.1.pt", "last.2.pt"), reversed(states), strict=False):
        loaded, rest = load(tmp_path / name, "ddp")
        assert equal(loaded, wanted)
    assert rest == {"epoch": 1}


def test_files_of_the_user_beside_it_do_not_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Shards to which a damaged ``last.1.pt`` may refer stay; a file with a name of its own is no such checkpoint."""
    path = tmp_path / "last.pt"
    (old := tmp_path / "last.pt.shards" / "old").mkdir(parents=True)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "last.0.5acc.pt")
    (tmp_path / "last.1.pt").write_text("damaged")
    save_checkpoint(path, epoch=1)
    assert old.exists()
    assert re.search("Old shards of .*last.pt are kept: .*last.1.pt is damaged", caplog.text)
    (tmp_path / "last.1.pt").unlink()
    save_checkpoint(path, epoch=2)
    assert not old.exists()
    assert load_checkpoint(path) == {"epoch": 2}


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_an_index_of_another_python_is_read(module: str) -> None:
    """In which the class of a path is in another module; it becomes a path that touches no disk."""
    pickled = b"".join([pickle.PROTO, b"\x02c", module.encode(), b"\nPosixPath\n", b"(X\x01\x00\x00\x00at", b"R."])
    assert DataUnpickler(io.BytesIO(pickled)).load() == PurePath("a")


def without_a_shard(folder: Path) -> None:
    next(folder.glob("*.distcp")).unlink()


def truncated(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def with_code(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_a_shard, "the tensors in .* cannot be read: .*No such file"),
        (truncated, "the tensors in .* cannot be read"),
        (with_code, "which could run code"),
    ],
)
def test_damaged_shards_are_an_error_on_every_rank(
    executors: dict[int, ParallelExecutor], damage: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is loaded, nor run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.pt"
    executors[2].run(save, path)
    damage(next((tmp_path / "last.pt.shards").iterdir()))

    def scenario() -> bool:
        model, optimizer = trained("fsdp", seed=5)
        before = state(model, optimizer)
        with pytest.raises((ValueError, RankError), match=words):
            load_checkpoint(path, model=model, optimizer=optimizer)
        return equal(state(model, optimizer), before)

    assert executors[2].run(scenario) == [True, True]
    assert not (tmp_path / "harmed").exists()


def test_a_rank_that_cannot_write_leaves_the_old_checkpoint(
    executors: dict[int, ParallelExecutor], tmp_path: Path
) -> None:
    """The disk of rank 1 is full: an error on all, the old one is whole, and nothing new is left."""
    path = tmp_path / "last.pt"
    wanted, *_ = executors[2].run(save, path)
    before = folders(path)

    def fails() -> Any:
        import errno

        from torch.distributed.checkpoint import FileSystemWriter

        def full(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        world, original = initialize_ddp(), FileSystemWriter.write_data
        if world.rank == 1:
            FileSystemWriter.write_data = full  # type: ignore[method-assign]
        try:
            group = dist.group.WORLD
            save(path, seed=1)
        except RankError as error:
            is_kept = dist.group.WORLD is group  # models that it connects go on
            cause: Any = error.failures[1].__cause__
            return str(error), is_kept, type(error.failures[1]), str(cause), "write_data" in cause.tb
        finally:
            FileSystemWriter.write_data = original  # type: ignore[method-assign]
        return "no error"

    words = "save_checkpoint() failed on rank 1 of 2: OSError: [Errno 28] No space left on device (1 sub-exception)"
    assert executors[2].run(fails) == [(words, True, OSError, "raised by rank 1 of 2", True)] * 2
    assert folders(path) == before
    assert equal(load(path, "ddp")[0], wanted)


KILLS = 10  # by turns of ranks that wait for each save, and of ranks that do not


def save_for_ever(path: Path, asynchronous: bool) -> None:
    for seed in itertools.count(1):
        save(path, seed=seed, keep=2, asynchronous=asynchronous)
        on_rank(0)(print)("saved", flush=True)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    """Of all ranks, at some moments within a save, which takes some 0.15 s; what is left is cleaned."""
    path = tmp_path / "last.pt"
    for number in range(KILLS):
        asynchronous = number % 2 > 0
        with launched(2) as ranks:
            ranks.run(save_for_ever, path, asynchronous, only=[], also=[0, 1])
            deadline = time.monotonic() + ANSWER_WITHIN_S
            while ranks.printed().count("saved") <= asynchronous:  # the second save begins when the first is written
                assert time.monotonic() < deadline, ranks.printed()
                time.sleep(0.001)
            time.sleep(0.15 * number / KILLS)
            for pid in ranks.pids:
                os.kill(pid, signal.SIGKILL)
        # Now both ranks have ended, and hold the lock of their folder no more.
        rest = load_checkpoint(path)
        assert rest["epoch"] >= 1
        assert all(value.isfinite().all() for value in rest["model"].values())
    save(path)
    assert len(folders(path)) <= 1  # that of last.1.pt


def test_alone_there_is_nothing_to_shard(tmp_path: Path) -> None:
    """One file, as always."""
    model, optimizer = trained("fsdp", seed=0)
    save_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer, sharded=True)
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]
    assert equal(load(tmp_path / "last.pt", "ddp")[0], state(model, optimizer))
