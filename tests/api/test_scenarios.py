"""What the tests of accelerate and torchtitan, and the loops of pytorch/examples, ask for: at 2 and at 3 ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from nn_parallel import (
    ParallelExecutor,
    accumulate,
    all_gather_object,
    all_gather_tensor,
    any_rank,
    broadcast,
    current_world,
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_dataloader,
    prepare_model,
    rank_first,
    reduce_metrics,
    save_checkpoint,
    seed_everything,
)

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def executors() -> Iterator[dict[int, ParallelExecutor]]:
    with ParallelExecutor(num_workers=2, devices="cpu") as two, ParallelExecutor(num_workers=3, devices="cpu") as three:
        yield {2: two, 3: three}


@pytest.fixture(params=[2, 3])
def run(request: pytest.FixtureRequest, executors: dict[int, ParallelExecutor]) -> Run:
    return executors[request.param].run


def numbers(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(n)), **options)


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [x.tolist() for (x,) in loader]


# Loaders: who draws what, and where they end.


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [1, 11, 24, 25])
def test_loaders_end_together(run: Run, n: int, drop_last: bool) -> None:
    """Whatever the length, all ranks make equally many batches of equal sizes, and together they have each sample."""
    loaders = run(lambda: batches(prepare_dataloader(numbers(n, batch_size=4, drop_last=drop_last))))
    assert len({str([len(batch) for batch in loader]) for loader in loaders}) == 1
    seen = {sample for loader in loaders for batch in loader for sample in batch}
    whole = 4 * len(loaders)
    assert seen == set(range(n // whole * whole if drop_last else n))


def test_batches_of_a_batch_sampler_go_to_one_rank_each(run: Run) -> None:
    """They are not cut, and the ranks take turns."""

    def scenario() -> list[list[int]]:
        sampler = BatchSampler(SequentialSampler(range(24)), batch_size=4, drop_last=False)

        class Own(BatchSampler):
            def __iter__(self) -> Iterator[list[int]]:
                return iter([list(batch) for batch in sampler])

        return batches(prepare_dataloader(numbers(24, batch_sampler=Own(SequentialSampler(range(24)), 4, False))))

    loaders = run(scenario)
    together = [batch for step in zip(*loaders, strict=True) for batch in step]
    assert together == [list(range(start, start + 4)) for start in range(0, 24, 4)]


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.n))


@pytest.mark.parametrize("n", [1, 7, 12, 13])
def test_streams_end_together(run: Run, n: int) -> None:
    """An iterable dataset of any length: padded to equally many; exact, each sample once."""

    def scenario(pad: bool) -> list[list[int]]:
        return [batch.tolist() for batch in prepare_dataloader(DataLoader(Stream(n), batch_size=2), pad=pad)]

    padded, exact = run(scenario, True), run(scenario, False)
    assert len({str([len(batch) for batch in loader]) for loader in padded}) == 1
    assert {sample for loader in padded for batch in loader for sample in batch} == set(range(n))
    assert sorted(sample for loader in exact for batch in loader for sample in batch) == list(range(n))


@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream"])
def test_the_order_is_that_of_any_number_of_ranks(executors: dict[int, ParallelExecutor], kind: str) -> None:
    """One, two and three ranks that draw 12 samples a step draw the same steps."""

    def steps(world_size: int) -> list[list[int]]:
        options: Any = {"batch_size": 12 // world_size}
        loader = (
            DataLoader(Stream(60), **options) if kind == "stream" else numbers(60, shuffle=kind[0] == "s", **options)
        )
        return [
            torch.as_tensor(x[0] if isinstance(x, list) else x).tolist() for x in prepare_dataloader(loader, seed=7)
        ]

    alone = [sorted(step) for step in steps(1)]
    assert sorted(chain(*alone)) == list(range(60))
    for world_size, pool in executors.items():
        assert [sorted(chain(*step)) for step in zip(*pool.run(steps, world_size), strict=True)] == alone


def test_a_loop_left_early_and_begun_again(run: Run) -> None:
    """A loader that is iterated again after a break begins at the beginning, on every rank, and two can be nested."""

    def scenario() -> Any:
        outer, inner = (prepare_dataloader(numbers(12, batch_size=2)) for _ in range(2))
        first = next(iter(outer))[0].tolist()
        nested = [(x.tolist(), sum(len(y) for (y,) in inner)) for (x,) in outer]
        return first, nested

    for first, nested in run(scenario):
        assert first == nested[0][0]
        assert len({count for _, count in nested}) == 1


# Random numbers.


def test_ranks_draw_alike_what_they_share_and_differ_in_the_rest(run: Run) -> None:
    """The shuffled order is one for all ranks, whatever their seeds; what the loop draws is another on each."""

    def scenario() -> Any:
        seed_everything(4)
        loader = prepare_dataloader(numbers(24, batch_size=2, shuffle=True))
        return batches(loader), batches(loader), torch.rand(3).tolist()

    results = run(scenario)
    for epoch in (0, 1):
        assert sorted(sample for result in results for batch in result[epoch] for sample in batch) == list(range(24))
    assert len({str(noise) for _, _, noise in results}) == len(results)
    assert run(scenario) == results


def test_random_numbers_of_each_rank_come_back(run: Run, tmp_path: Path) -> None:
    """With a checkpoint: each rank draws the numbers that would have come next. Not with a pretrained model alone."""

    def scenario() -> bool:
        seed_everything(5)
        model = nn.Linear(1, 1)
        save_checkpoint(tmp_path / "last.pt", model=model)
        drawn = torch.rand(4)
        torch.manual_seed(0)
        load_checkpoint(tmp_path / "last.pt", model=model)
        goes_on_by_itself = torch.initial_seed() == 0 and not torch.equal(drawn, torch.rand(4))
        load_checkpoint(tmp_path / "last.pt")
        return goes_on_by_itself and torch.equal(drawn, torch.rand(4))

    assert all(run(scenario))


# Gradients.


def count_syncs(model: Any) -> list[int]:
    """The number of buckets that ``model`` has sent so far, as one number in a list."""
    sent = [0]

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at the types
        sent[0] += 1
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("n", [24, 27])
def test_gradients_are_sent_with_every_second_step_and_the_last(run: Run, n: int) -> None:
    """And at no other; of two models each counts for itself; gradients are equal on all ranks exactly then."""

    def scenario() -> Any:
        seed_everything(0)
        models = [prepare_model(nn.Linear(1, 1)) for _ in range(2)]
        sent, told = [count_syncs(model) for model in models], []
        loader = prepare_dataloader(numbers(n, batch_size=2))
        for step, (x,) in enumerate(loader):
            last = step == len(loader) - 1
            with accumulate(models[0], step, 2, last=last) as complete:
                models[0](x[:, None].float() + 1).sum().backward()
            models[1](x[:, None].float()).sum().backward()
            gradient = models[0].module.weight.grad  # type: ignore[union-attr]
            alike = len(set(map(float, all_gather_object(gradient.item())))) == 1
            told.append((complete, alike, sent[0][0], sent[1][0]))
            if complete:
                models[0].zero_grad()
        return told

    for told in run(scenario):
        steps = len(told)
        for step, (complete, alike, first, second) in enumerate(told):
            due = step % 2 == 1 or step == steps - 1
            assert (complete, alike, second) == (due, due, step + 1)
            assert first == (step + 1) // 2 + (due and step % 2 == 0)


def parameters(batch_size: int) -> list[torch.Tensor]:
    """After two epochs of SGD with a scheduler."""
    torch.manual_seed(1)
    model = prepare_model(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = prepare_dataloader(numbers(48, batch_size=batch_size, shuffle=True), seed=3)
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x[:, None] / 48) - 1).square().mean().backward()
            optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_on_ranks_is_training_on_one(run: Run) -> None:
    """Of the same samples together in each step: the same parameters."""
    ranks = len(run(int))
    alone = parameters(24 // ranks * ranks)
    for result in run(parameters, 24 // ranks):
        for mine, wanted in zip(result, alone, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)


# Metrics.


def test_the_accuracy_over_an_uneven_set_is_exact(run: Run) -> None:
    """As one process has it: gathered, and reduced; also where some ranks have fewer samples, or none."""
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 53):
        scores, labels = torch.randn(n, 5, generator=generator), torch.randint(5, (n,), generator=generator)
        exact = (scores.argmax(1) == labels).double().mean().item()

        def scenario(scores: torch.Tensor, labels: torch.Tensor) -> Any:
            hits = [torch.empty(0)]
            for x, y in prepare_dataloader(DataLoader(TensorDataset(scores, labels), batch_size=4), pad=False):
                hits.append((x.argmax(1) == y).float())
            mine = torch.cat(hits)
            mean = mine.double().mean().item() if len(mine) else 0.0
            reduced = reduce_metrics({"accuracy": mean}, weight=len(mine))["accuracy"]
            return all_gather_tensor(mine).double().mean().item(), reduced

        for gathered, reduced in run(scenario, scores, labels):
            assert gathered == pytest.approx(exact, abs=1e-12)
            assert reduced == pytest.approx(exact, abs=1e-12)


def test_nests_of_tensors_are_gathered_and_broadcast(run: Run) -> None:
    """Any object: dicts, tuples and lists of tensors of other shapes on each rank."""

    def scenario() -> Any:
        rank = current_world().rank
        nest = {"a": (torch.full((rank + 1,), float(rank)), [rank]), "b": "text"}
        return [each["a"][0].tolist() for each in all_gather_object(nest)], broadcast(nest, src=1)["a"][1]

    for gathered, sent in run(scenario):
        assert gathered == [[float(rank)] * (rank + 1) for rank in range(len(gathered))]
        assert sent == [1]


# Who runs what.


def test_one_rank_first_then_the_others(run: Run, tmp_path: Path) -> None:
    """Rank 0 finds nothing and makes it, the others find it; what one rank runs, it runs once; all stop together."""

    def scenario() -> Any:
        rank, path = current_world().rank, tmp_path / "made"
        with rank_first():
            found = path.exists()
            path.touch()
        ran = on_rank(-1, broadcast=True)(lambda: current_world().rank)()
        stops = [any_rank(rank == 1 and epoch == 2) for epoch in range(4)]
        return found, ran, stops

    results = run(scenario)
    assert [found for found, _, _ in results] == [False] + [True] * (len(results) - 1)
    assert {ran for _, ran, _ in results} == {len(results) - 1}
    assert [stops for _, _, stops in results] == [[False, False, True, False]] * len(results)


def test_work_is_split_between_ranks_of_any_number(executors: dict[int, ParallelExecutor]) -> None:
    """More items than ranks, fewer, or none: results in order."""
    for pool in executors.values():
        for n in (0, 1, 7):
            assert list(pool.map(lambda x: 10 * x, range(n))) == [10 * x for x in range(n)]


# Checkpoints.


def test_a_stream_goes_on_in_the_middle_of_an_epoch(run: Run, tmp_path: Path) -> None:
    """With the batches that would have come, once each."""

    def scenario() -> Any:
        loader = prepare_dataloader(DataLoader(Stream(40), batch_size=3), pad=False)
        iterator = iter(loader)
        taken = [next(iterator).tolist() for _ in range(2)]
        save_checkpoint(tmp_path / "last.pt", loader=loader)
        wanted = [batch.tolist() for batch in iterator]
        resumed = prepare_dataloader(DataLoader(Stream(40), batch_size=3), pad=False)
        load_checkpoint(tmp_path / "last.pt", loader=resumed)
        return taken, wanted, [batch.tolist() for batch in resumed]

    results = run(scenario)
    assert all(wanted == rest for _, wanted, rest in results)
    drawn = [sample for taken, wanted, _ in results for batch in [*taken, *wanted] for sample in batch]
    assert sorted(drawn) == list(range(40))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_checkpoints_go_from_ranks_to_other_ranks(
    executors: dict[int, ParallelExecutor], tmp_path: Path, strategy: str, sharded: bool
) -> None:
    """Of two ranks on three, on one, back on two: with the same parameters and moments; no sample comes twice."""

    def begin(batch_size: int) -> dict[str, Any]:
        initialize_ddp()
        model = prepare_model(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters())
        loader = prepare_dataloader(numbers(36, batch_size=batch_size, shuffle=True), seed=1)
        return {"model": model, "optimizer": optimizer, "loader": loader}

    def values(parts: dict[str, Any]) -> list[float]:
        kept = [*parts["model"].parameters()]
        kept += [state["exp_avg"] for state in parts["optimizer"].state_dict()["state"].values()]
        return torch.cat([getattr(x, "full_tensor", x.detach)().flatten() for x in kept]).tolist()

    def save(path: Path) -> Any:
        parts, seen = begin(3), list[int]()
        for _, (x,) in zip(range(2), parts["loader"], strict=False):
            seen += x.tolist()
            parts["model"](x[:, None] / 36).sum().backward()
            parts["optimizer"].step()
        save_checkpoint(path, sharded=sharded, **parts)
        return seen, values(parts)

    def pass_on(path: Path, to: Path, batch_size: int) -> Any:
        parts = begin(batch_size)
        load_checkpoint(path, **parts)
        save_checkpoint(to, sharded=sharded, **parts)
        return list(chain(*batches(parts["loader"]))), values(parts)

    paths = [tmp_path / name for name in "abcd"]
    results = executors[2].run(save, paths[0])
    seen, kept = list(chain(*(seen for seen, _ in results))), results[0][1]
    for number, (world_size, batch_size) in enumerate([(3, 2), (1, 6), (2, 3)]):
        arguments = (*paths[number : number + 2], batch_size)
        results = executors[world_size].run(pass_on, *arguments) if world_size > 1 else [pass_on(*arguments)]
        assert sorted(chain(seen, *(rest for rest, _ in results))) == list(range(36))
        assert all(each == kept for _, each in results)


def test_the_last_and_the_best_are_there(run: Run, tmp_path: Path) -> None:
    """As the loop of imagenet keeps them: the last three, and the one whose metric, the same on all ranks, was best."""

    def scenario() -> None:
        model, best = prepare_model(nn.Linear(1, 1)), 0.0
        for epoch, accuracy in enumerate([0.2, 0.6, 0.5, 0.4]):
            accuracy = reduce_metrics({"accuracy": accuracy})["accuracy"]
            save_checkpoint(tmp_path / "last.pt", keep=3, model=model, epoch=epoch)
            if accuracy > best:
                best = accuracy
                save_checkpoint(tmp_path / "best.pt", model=model, epoch=epoch)

    run(scenario)
    epochs = {path.name: torch.load(path)["epoch"] for path in tmp_path.iterdir()}
    assert epochs == {"last.pt": 3, "last.1.pt": 2, "last.2.pt": 1, "best.pt": 1}


def test_nothing_saved_and_nothing_missing(run: Run, tmp_path: Path) -> None:
    """A target that the file has not got is named, and so is the file of another model, on every rank."""

    def scenario() -> list[str]:
        save_checkpoint(tmp_path / "last.pt", model=nn.Linear(1, 1))
        told = []
        for targets in ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, {"model": nn.Linear(2, 1)}):
            with pytest.raises(ValueError, match="does not fit") as raised:
                load_checkpoint(tmp_path / "last.pt", **targets)
            told.append(str(raised.value))
        return told

    for missing, other in run(scenario):
        assert "the file has no 'optimizer', only 'model'" in missing
        assert "copying a param with shape torch.Size([1, 1]) from checkpoint" in other
