"""Checkpoints: training goes on bit for bit, at any number of ranks; a kill or a full disk loses nothing."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from nn_parallel import (
    ParallelExecutor,
    RankError,
    WorkerDiedError,
    all_gather_object,
    initialize_ddp,
    load_checkpoint,
    prepare_dataloader,
    prepare_model,
    save_checkpoint,
    seed_everything,
    unwrap_model,
)
from nn_parallel.training import _checkpoint_file as checkpoint_file
from tests.support.networks import Net, equal
from tests.support.ranks import AnyRanks

KILLS = 8
NEVER, NOBODY = 1_000_000, (-1, 0, 0)


class Training:
    """A loop with everything that there is to save, and random numbers of every kind in its data."""

    def __init__(self, **options: Any) -> None:
        initialize_ddp()
        seed_everything(0)
        self.model = prepare_model(Net(), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu")
        self.average = AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        generator = torch.Generator().manual_seed(1)
        dataset = TensorDataset(torch.randn(32, 8, generator=generator))
        self.loader = prepare_dataloader(DataLoader(dataset, batch_size=4, shuffle=True))
        self.epoch = 0

    @property
    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "average")
        return {name: getattr(self, name) for name in names} | {"loader": self.loader}

    def train(self, epochs: int, save_after: int = 0, path: Path = Path()) -> None:
        """``save_after`` so many steps of each epoch, if that is not 0."""
        for _ in range(epochs):
            for step, (x,) in enumerate(self.loader, 1):
                noise = torch.rand(()) + random.random() + np.random.rand()
                loss = (self.model(x) + noise).square().mean()
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if not hasattr(next(self.model.parameters()), "full_tensor"):
                    self.average.update_parameters(unwrap_model(self.model))
                if step == save_after:
                    self.save(path)
            self.scheduler.step()
            self.epoch += 1

    def save(self, path: Path) -> None:
        save_checkpoint(path, **self.parts, epoch=self.epoch, best=float("inf"), history=[{"loss": 0.5}])

    def load(self, path: Path) -> dict[str, Any]:
        rest = load_checkpoint(path, **self.parts)
        self.epoch = rest["epoch"]
        return rest

    def state(self) -> dict[str, torch.Tensor]:
        """All numbers that training depends on."""
        values = {f"model.{k}": v for k, v in unwrap_model(self.model).state_dict().items()}
        values |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            values |= {f"optimizer.{number}.{k}": v for k, v in state.items()}
        values["lr"] = torch.tensor(self.scheduler.get_last_lr())
        return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in values.items()}


@pytest.mark.slow
def test_resumed_training_is_the_uninterrupted_run_bit_for_bit(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """Model, optimizer, scheduler, scaler, average, order of the data, random numbers of every rank, epoch."""

    n = len(any_ranks.run(int))
    # After its first step DDP sorts the gradients anew, and gloo adds three numbers in an order that depends on their
    # place; with this option DDP leaves them where they are.
    options = {"find_unused_parameters": n > 2}

    def scenario() -> Any:
        straight = Training(**options)
        straight.train(2)
        straight.save(tmp_path / "last.pt")
        straight.train(2)
        resumed = Training(**options)
        before = resumed.state()
        rest = resumed.load(tmp_path / "last.pt")
        resumed.train(2)
        return equal(straight.state(), resumed.state()), equal(before, resumed.state()), rest, resumed.epoch

    for same, unchanged, rest, epoch in any_ranks.run(scenario):
        assert same
        assert not unchanged
        assert rest == {"epoch": 2, "best": float("inf"), "history": [{"loss": 0.5}]}
        assert epoch == 4
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_training_goes_on_in_the_middle_of_an_epoch(any_ranks: AnyRanks, tmp_path: Path, steps: int) -> None:
    """With the next batch: the parameters are those of the uninterrupted run, bit for bit."""
    options = {"find_unused_parameters": len(any_ranks.run(int)) > 2}  # see the test above

    def scenario() -> bool:
        straight = Training(**options)
        straight.train(1)
        straight.train(1, save_after=steps, path=tmp_path / "last.pt")
        straight.train(1)
        resumed = Training(**options)
        resumed.load(tmp_path / "last.pt")
        assert (resumed.epoch, resumed.loader.sampler.epoch) == (1, 1)
        resumed.train(2)
        return equal(straight.state(), resumed.state())

    assert all(any_ranks.run(scenario))


def train_until_killed(path: Path, steps: int, kill: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """``steps`` steps, those before the checkpoint left out. ``kill``: a rank, its step, and a moment in it."""
    training = Training(find_unused_parameters=True)
    done = load_checkpoint(path, **training.parts)["step"] if path.exists() else 0
    rank = initialize_ddp().rank
    while done < steps:
        for (x,) in training.loader:
            for moment in range(3):
                if kill == (rank, done, moment):
                    os.kill(os.getpid(), signal.SIGKILL)
                if moment == 0:
                    loss = (training.model(x) + torch.rand(()) + random.random() + np.random.rand()).square().mean()
                    training.optimizer.zero_grad()
                    loss.backward()
                    training.optimizer.step()
                    training.average.update_parameters(unwrap_model(training.model))
                    done += 1
                elif moment == 1 and done % 3 != 1:
                    save_checkpoint(path, **training.parts, step=done)
            if done == steps:
                break
    return training.state()


@pytest.mark.slow
def test_training_that_is_killed_again_and_again_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """A rank is killed at a random step, before it, after it or after its checkpoint, and all go on; `KILLS` times."""
    ranks, path, done = 3, tmp_path / "last.pt", 0
    draw = random.Random(ranks)
    with ParallelExecutor(num_workers=ranks, devices="cpu") as ex:
        for _ in range(KILLS):
            kill = draw.randrange(ranks), done + draw.randrange(1, 6), draw.randrange(3)
            with pytest.raises(RankError) as raised:
                ex.run(train_until_killed, path, NEVER, kill)
            assert any(isinstance(each, WorkerDiedError) for each in raised.value.exceptions), raised.value
            done = torch.load(path)["step"] if path.exists() else 0
        resumed = ex.run(train_until_killed, path, done + 5, NOBODY)
        whole = ex.run(train_until_killed, tmp_path / "whole.pt", done + 5, NOBODY)
    assert done > KILLS // 2
    assert all(equal(a, b) for a, b in zip(resumed, whole, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", ["ddp", "fsdp"])
def test_a_checkpoint_loads_at_any_number_of_ranks(executor2: ParallelExecutor, tmp_path: Path, saved_by: str) -> None:
    """2 ranks -> 1 -> 4, sharded or not: the same numbers in model and optimizer."""

    def save() -> Any:
        training = Training(strategy=saved_by)
        training.train(1)
        training.save(tmp_path / "a.pt")
        return training.state()

    def load_and_save(strategy: str, source: str, target: str) -> Any:
        training = Training(strategy=strategy)
        training.load(tmp_path / source)
        training.save(tmp_path / target)
        return training.state()

    wanted, _ = executor2.run(save)
    assert equal(load_and_save("ddp", "a.pt", "b.pt"), wanted)
    with ParallelExecutor(num_workers=4, devices="cpu") as four:
        assert all(equal(state, wanted) for state in four.run(load_and_save, "ddp", "b.pt", "c.pt"))
        assert all(equal(state, wanted) for state in four.run(load_and_save, "fsdp", "c.pt", "d.pt"))
    assert all(equal(state, wanted) for state in executor2.run(load_and_save, "fsdp", "d.pt", "e.pt"))
    assert torch.load(tmp_path / "e.pt", weights_only=True)["model"].keys() == Net().state_dict().keys()


def truncated(path: Path) -> dict[str, Any]:
    path.write_bytes(path.read_bytes()[:-200])
    return {"model": Net()}


def emptied(path: Path) -> dict[str, Any]:
    path.write_bytes(b"")
    return {"model": Net()}


def with_code(path: Path) -> dict[str, Any]:
    torch.save({"model": Net()}, path)
    return {"model": Net()}


def unreadable(path: Path) -> dict[str, Any]:
    path.unlink()
    path.mkdir()
    return {"model": Net()}


def other_optimizer(path: Path) -> dict[str, Any]:
    model = Net()
    parameters = list(model.parameters())
    return {"model": model, "optimizer": torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncated, "is damaged or is not a checkpoint"),
        (emptied, "is damaged or is not a checkpoint"),
        (with_code, "holds objects that could run code when they are loaded: "),
        (unreadable, "Is a directory"),
        (lambda path: path.unlink() or {"model": Net()}, "No such file or directory"),
        (lambda path: path.write_text("epoch 3") and {"model": Net()}, "is damaged or is not a checkpoint"),
        (lambda path: torch.save([1], path) or {"model": Net()}, "holds a list, but a checkpoint is a dict"),
        (
            lambda path: {"model": Net(16)},
            "model cannot be loaded: RuntimeError: Error(s) in loading",
        ),
        (lambda path: {"model": nn.Linear(2, 2)}, 'Missing key(s) in state_dict: "weight", "bias"'),
        (
            lambda path: {"epoch": nn.Linear(2, 2)},
            "epoch cannot be loaded: TypeError: Expected",
        ),
        (lambda path: {"model": Net(), "ema": Net()}, "the file has no 'ema', only 'model', 'optimizer'"),
        (other_optimizer, "optimizer cannot be loaded: ValueError: loaded state dict has a different number of"),
        (lambda path: {"model": Net(), "epoch": 3}, "epoch is a int without load_state_dict"),
        (lambda path: {"epoch": torch.optim.SGD(Net().parameters())}, "epoch cannot be loaded: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_checkpoint_is_an_error_on_every_rank(
    executor2: ParallelExecutor, tmp_path: Path, spoil: Any, words: str, ranks: int
) -> None:
    """The message says what is wrong, and the ranks go on. Nothing is loaded where the file is at fault."""
    path = tmp_path / "a.pt"
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    save_checkpoint(path, model=model, optimizer=optimizer, epoch=3)
    targets = spoil(path)

    def scenario() -> Any:
        initialize_ddp()
        before = (
            {name: value.clone() for name, value in targets["model"].state_dict().items()} if "model" in targets else {}
        )
        try:
            load_checkpoint(path, **targets)
        except (ValueError, OSError, RankError) as error:
            leaf = error.failures[0] if isinstance(error, RankError) else error
            unchanged = equal(before, targets["model"].state_dict()) if before else True
            return f"{type(leaf).__name__}: {leaf}", unchanged
        return "no error", False

    for told, unchanged in executor2.run(scenario) if ranks == 2 else [scenario()]:
        assert words in told
        assert told.startswith(("ValueError", "FileNotFoundError", "IsADirectoryError"))
        assert unchanged or "cannot be loaded" in told  # torch has begun to load


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_could_not_be_loaded_is_not_saved(executor2: ParallelExecutor, tmp_path: Path, ranks: int) -> None:
    """The error names it, on every rank; the checkpoint before is still there, and nothing beside it."""
    path = tmp_path / "a.pt"

    def scenario() -> list[str]:
        initialize_ddp()
        save_checkpoint(path, epoch=1)
        told = []
        for state in ({"folder": path}, {"lock": threading.Lock()}, {"random_states": 1}):
            try:
                save_checkpoint(path, epoch=2, **state)
            except (ValueError, RankError) as error:
                told.append(str(error.failures[0] if isinstance(error, RankError) else error))
        return [*told, load_checkpoint(path)["epoch"]]

    for folder, lock, reserved, epoch in executor2.run(scenario) if ranks == 2 else [scenario()]:
        assert folder.startswith("folder is a PosixPath: a checkpoint holds numbers, strings, tensors")
        assert lock.startswith("lock is a lock: a checkpoint holds numbers, strings, tensors")
        assert "The name 'random_states' is reserved" in reserved
        assert epoch == 1
    assert os.listdir(tmp_path) == ["a.pt"]


class Stubborn(nn.Linear):
    """A model that accepts nothing, though the names and shapes are right."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        raise LookupError("not mine")


def test_what_one_rank_cannot_load_is_an_error_on_every_rank(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """The rank itself has torch's error as the cause, the others its words; then the ranks go on, in step."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, model=nn.Linear(4, 4))

    def scenario() -> Any:
        rank = initialize_ddp().rank
        try:
            load_checkpoint(path, model=Stubborn(4, 4) if rank else nn.Linear(4, 4))
        except ValueError as error:
            load_checkpoint(path, model=nn.Linear(4, 4))
            return str(error), type(error.__cause__).__name__
        return "no error", ""

    words = f"{path} does not fit: model cannot be loaded: LookupError: not mine"
    assert executor2.run(scenario) == [(words, "NoneType"), (words, "LookupError")]


@pytest.mark.slow
def test_zero_is_saved_whole(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """The state of torch's ZeroRedundancyOptimizer is on all ranks; each has its part again after loading."""

    def scenario() -> bool:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit

        initialize_ddp()

        def made() -> tuple[nn.Module, Any]:
            torch.manual_seed(0)
            model = prepare_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
            return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)

        def step(model: nn.Module, optimizer: Any) -> None:
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        model, optimizer = made()
        step(model, optimizer)
        optimizer.consolidate_state_dict(0)  # as torch's recipe has it; it is of no use here, and does no harm
        step(model, optimizer)
        save_checkpoint(tmp_path / "a.pt", model=model, optimizer=optimizer)
        again, its_optimizer = made()
        load_checkpoint(tmp_path / "a.pt", model=again, optimizer=its_optimizer)
        for _ in range(2):
            step(model, optimizer)
            step(again, its_optimizer)
        return equal(unwrap_model(model).state_dict(), unwrap_model(again).state_dict())

    assert all(any_ranks.run(scenario))


def test_that_there_is_none_yet_is_plain_on_every_rank(any_ranks: AnyRanks, tmp_path: Path) -> None:
    """So that one ``except FileNotFoundError`` begins a training, alone and on many ranks; the group goes on."""

    def scenario() -> tuple[str, list[int]]:
        initialize_ddp()
        try:
            load_checkpoint(tmp_path / "last.pt", model=nn.Linear(1, 1))
        except FileNotFoundError as error:
            told = str(error)
        return told, all_gather_object(1)

    results = any_ranks.run(scenario)
    for told, ones in results:
        assert told == f"[Errno 2] No such file or directory: '{tmp_path / 'last.pt'}'"
        assert ones == [1] * len(results)


@pytest.mark.parametrize("there", ["nothing", "another", "damaged", "the same"])
def test_a_rank_that_has_not_the_file_gets_it_from_rank_0(
    executor2: ParallelExecutor, tmp_path: Path, there: str
) -> None:
    """On its disk is nothing under that name, another checkpoint, or half of one: all load what rank 0 has."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), "x": torch.arange(3)}, tmp_path / "0" / "last.pt")
    other = tmp_path / "1" / "last.pt"
    if there == "another":
        torch.save({"model": nn.Linear(2, 2).state_dict(), "x": torch.arange(3)}, other)
    elif there == "damaged":
        other.write_bytes((tmp_path / "0" / "last.pt").read_bytes()[:200])
    elif there == "the same":
        os.link(tmp_path / "0" / "last.pt", other)

    def scenario() -> tuple[list[float], list[int], bool]:
        rank = initialize_ddp().rank
        os.chdir(tmp_path / str(rank))
        try:
            loaded = nn.Linear(2, 2)
            rest = load_checkpoint("last.pt", model=loaded)
        finally:
            os.chdir("/")
        tensors = [*loaded.state_dict().values(), rest["x"]]
        maps = Path("/proc/self/maps").read_text()
        return (
            [value for tensor in tensors[:2] for value in tensor.flatten().tolist()],
            tensors[2].tolist(),
            "last.pt" in maps,
        )

    wanted = [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]
    assert executor2.run(scenario) == [(wanted, [0, 1, 2], False)] * 2


def test_called_on_one_rank_only_it_is_an_error_that_says_so(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """The old habit, in the body of a function of rank 0."""
    from nn_parallel import on_rank

    def scenario() -> str:
        initialize_ddp()
        try:
            on_rank(0)(save_checkpoint)(tmp_path / "a.pt", epoch=1)
        except RankError as error:
            return str(error.failures[0])
        return "no error"

    for told in executor2.run(scenario):
        assert "save_checkpoint() on ranks 0-1 at" in told
        assert "is a call of all ranks, inside the body of a function of rank 0" in told
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["state_dict", "distribute_tensor"])
def test_one_rank_fails_in_loading(executor2: ParallelExecutor, tmp_path: Path, where: str) -> None:
    """As by want of memory, alone, while the other one is about to send it its part: both raise, and go on."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, model=nn.Linear(4, 4))

    def scenario() -> tuple[list[int], str]:
        rank = initialize_ddp().rank
        model = prepare_model(nn.Linear(4, 4), strategy="fsdp")

        def out_of_memory(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError, match="load_checkpoint") as caught:
            if rank == 1:
                patch.setattr(torch.distributed.tensor if where == "distribute_tensor" else model, where, out_of_memory)
            load_checkpoint(path, model=model)
        load_checkpoint(path, model=prepare_model(nn.Linear(4, 4), strategy="fsdp"))
        return list(caught.value.failures), str(caught.value)

    for failed, told in executor2.run(scenario):
        assert failed == [1]
        assert "OutOfMemoryError: no room" in told


def test_rank_0_alone_holds_the_whole_of_a_sharded_model(executor2: ParallelExecutor, tmp_path: Path) -> None:
    """The other ranks help to gather it, one tensor at a time."""

    def scenario() -> list[int]:
        initialize_ddp()
        model, whole = prepare_model(nn.Sequential(*[nn.Linear(33, 33) for _ in range(8)]), strategy="fsdp"), []

        class LastToBeStored:
            def state_dict(self) -> dict[str, int]:
                alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (33, 33)]
                whole.append(len({each.untyped_storage().data_ptr() for each in alive}))
                return {}

        gc.collect()
        save_checkpoint(tmp_path / "a.pt", model=model, last=LastToBeStored())
        return whole

    (kept,), (others,) = executor2.run(scenario)
    assert kept >= 8
    assert others <= 1


@pytest.mark.parametrize(("device", "place"), [("cuda:1", "cpu"), ("mps", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_a_checkpoint_is_read_where_there_is_no_accelerator(device: str, place: str) -> None:
    """Plain `torch.load` would ask for that of the rank which has saved it. Other files of torch stay as they were."""
    storage = mock.Mock(spec=torch.UntypedStorage, device=torch.device(device))
    storage.type.return_value = "torch.UntypedStorage"
    if place == "meta":
        storage = torch.empty(1, device="meta").untyped_storage()
    with checkpoint_file._read_on_the_cpu():
        assert torch.serialization.location_tag(storage) == place
    if device != "cpu":
        assert checkpoint_file._location(storage) is None


def test_random_numbers_are_not_restored_if_only_models_are_loaded(tmp_path: Path) -> None:
    """Loading only models usually begins a new training."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer)
    saved = torch.get_rng_state()
    torch.rand(())
    drawn = torch.get_rng_state()
    for targets, expected in ({"model": model}, drawn), ({"model": model, "optimizer": optimizer}, saved), ({}, saved):
        load_checkpoint(tmp_path / "last.pt", **targets)
        assert torch.equal(torch.get_rng_state(), expected)
