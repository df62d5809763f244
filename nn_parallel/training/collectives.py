"""Collectives on objects, tensors and metrics, by way of torch's own.

What differs between the ranks where it must not is an error on every rank. So each message says what it is about, in a
shape that does not depend on that.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..ddp import initialize_ddp
from ..errors import TransferError
from ..exchange import all_gather_packed, ranks_of
from ..launch.context import current_world
from ..pickling import dumps

T = TypeVar("T")
SLOTS = 64  # of the first message of `gather_numbers`: what it is about and the first numbers
HASH_BYTES = 6  # of what a message is about: an integer of so many is exact in float64
WHOLE_UP_TO = 2**53  # float64 holds every integer up to this one


def reduce_metrics(
    metrics: Mapping[str, float | torch.Tensor],
    *,
    weight: float = 1.0,
    op: str = "mean",
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Each metric over all ranks, by one all_gather for all of them, in float64.

    Args:
        metrics: numbers or tensors of one element, under the same names on every rank.
        weight: how much this rank counts in the mean: the number of its samples, if the metrics are means over them. A
            rank of weight 0 counts nothing, whatever its metrics say.
        op: ``"mean"``, weighted; ``"sum"``, ``"max"`` or ``"min"``.
        group: the ranks that take part; all if None.

    Returns:
        The metrics, the same on every rank: floats, but those that are integers on every rank stay integers under sum,
        max and min. A metric that is NaN on one rank is NaN.

    Raises:
        ValueError: on every rank: the names differ, a metric is no number or an integer beyond 2**53, or the weights
            add up to nothing. There is no such ``op``.

    Example::

        reduce_metrics({"loss": 0.5}, weight=len(batch))     # {'loss': 0.5}
        reduce_metrics({"correct": 12, "of": 16}, op="sum")  # {'correct': 24, 'of': 32} on two ranks
    """
    if op not in ("mean", "sum", "max", "min"):
        raise ValueError(f"op={op!r} is none of mean, sum, max, min.")
    if op != "mean" and weight != 1.0:
        raise ValueError(f"weight={weight} is for op='mean': op={op!r} counts every rank alike.")
    names, values, problem = sorted(metrics), list[float](), _problem_of(weight)
    is_float = [float(not isinstance(_plain(metrics[name]), numbers.Integral)) for name in names]
    for name in names:
        try:
            values.append(_number(metrics[name]))
        except ValueError as error:
            values.append(0.0)
            problem = problem or f"the metric {name!r} {error}"
    about = f"reduce_metrics(op={op!r}) of {', '.join(names) or 'nothing'}"
    rows = gather_numbers([*values, *is_float, 0.0 if problem else weight], about, problem, group)
    *columns, weights = zip(*rows, strict=True)
    of_ranks = dict(zip(names, zip(columns[: len(names)], columns[len(names) :], strict=True), strict=True))
    total = _total(weights, about) if op == "mean" else 0.0
    reduced = dict[str, float]()
    for name in metrics:
        column, floats = of_ranks[name]
        if op == "mean":
            weighted = zip(column, weights, strict=True)
            reduced[name] = sum(value * weight for value, weight in weighted if weight) / total
        else:
            values = [float(value) if any(floats) else int(value) for value in column]
            reduced[name] = sum(values) if op == "sum" else _largest(values) if op == "max" else _least(values)
    return reduced


def any_rank(flag: object) -> bool:
    """Whether ``flag`` is true on any rank; the same answer on all. Every rank calls it.

    Example::

        if any_rank(loss != loss):  # one rank has seen NaN: all stop
            break
    """
    return bool(reduce_metrics({"flag": int(bool(flag))}, op="max")["flag"])


def all_ranks(flag: object) -> bool:
    """Whether ``flag`` is true on all ranks; the same answer on all. Every rank calls it.

    Example::

        if all_ranks(epochs_without_improvement > patience):
            break
    """
    return not any_rank(not flag)


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``obj`` of every rank, on every rank, in rank order. Alone: a list of one.

    Args:
        obj: anything that can be pickled, functions and classes of ``__main__`` too.
        group: the ranks that take part; all if None.

    Raises:
        TransferError: on every rank: an object cannot be pickled, or not be rebuilt.

    Example::

        all_gather_object({"rank": current_world().rank})  # [{'rank': 0}, {'rank': 1}]
    """
    if initialize_ddp().world_size == 1:
        return [obj]
    try:
        packed = dumps((obj, ""), lambda: {"the object": obj})
    except TransferError as error:
        packed = dumps((None, str(error)))
    gathered = all_gather_packed(packed, group)
    told = zip(ranks_of(group), gathered, strict=True)
    if problems := [f"Rank {rank}: {problem}" for rank, (_, problem) in told if problem]:
        raise TransferError("\n".join(problems))
    return [obj for obj, _ in gathered]


def all_gather_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The tensors of all ranks, concatenated along dim 0 in rank order, on every rank. No gradient flows.

    Args:
        tensor: of shape (n, ...); n may differ between the ranks and be 0, the rest may not. One without dimensions
            counts as one of shape (1,).
        group: the ranks that take part; all if None.

    Returns:
        A tensor of shape (sum of all n, ...), on the device of ``tensor``: each row once, nothing is padded.

    Raises:
        ValueError: on every rank: dtypes or the other dimensions differ, or one is no tensor.

    Example::

        predictions = all_gather_tensor(model(x).argmax(dim=1))  # 7 samples here, 6 there: shape (13,)
    """
    mine = tensor.detach() if isinstance(tensor, torch.Tensor) else None
    if mine is not None and mine.dim() == 0:
        mine = mine[None]
    if initialize_ddp().world_size == 1 and mine is not None:
        return mine
    described = (len(mine), tuple(mine.shape[1:]), mine.dtype) if mine is not None else (0, type(tensor).__name__, None)
    device_type = mine.device.type if mine is not None else ""
    device_types, counts, *rows = zip(*all_gather_object((device_type, *described), group), strict=True)
    if mine is None or len(set(zip(*rows, strict=True))) > 1:
        told = [
            f"{(count, *row)} of {dtype} on rank {rank}" if dtype else f"a {row} on rank {rank}"
            for rank, count, row, dtype in zip(ranks_of(group), counts, *rows, strict=True)
        ]
        raise ValueError(f"Only dim 0 of the tensors may differ between the ranks, but they are {', '.join(told)}.")
    row_bytes = mine.element_size() * math.prod(mine.shape[1:])
    device = mine.device if can_gather(set(device_types), dist.get_backend_config(group)) else _message_device(group)
    sent = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=device)
    sent[: len(mine) * row_bytes] = mine.contiguous().flatten().view(torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent, group=group)
    parts = [part[: count * row_bytes] for part, count in zip(received, counts, strict=True)]
    return torch.cat(parts).to(mine.device).view(mine.dtype).view(sum(counts), *mine.shape[1:])


def can_gather(device_types: set[str], backends: str) -> bool:
    """Whether tensors on such devices are gathered where they lie; ``backends`` as ``cpu:gloo,cuda:nccl``.

    Gloo would copy them to the CPU.
    """
    backend_of = dict(pair.split(":") for pair in backends.split(","))
    return len(device_types) == 1 and backend_of.get(min(device_types), "gloo") != "gloo"


def sum_of_weights(weight: float, about: str, group: dist.ProcessGroup | None) -> float:
    """The sum of the weights of all ranks; for ``about`` see `gather_numbers`.

    Raises:
        ValueError: on every rank: a weight is negative or no number, or all are 0.
    """
    problem = _problem_of(weight)
    rows = gather_numbers([0.0 if problem else weight], about, problem, group)
    return _total([weight for (weight,) in rows], about)


def gather_numbers(
    values: Sequence[float], about: str, problem: str = "", group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """The ``values`` of every rank, in rank order: one all_gather, two where there are more than fit into the first.

    Args:
        about: what the values are, which must be the same on all ranks; of another text they may differ in number.
        problem: why the values of this rank must not be used.

    Raises:
        ValueError: on every rank: there is a ``problem`` on one, or ``about`` differs.
    """
    if initialize_ddp().world_size == 1:
        if problem:
            raise ValueError(f"{about}: {problem}.")
        return [list(values)]
    digest = hashlib.sha256(f"{len(values)} {about}".encode()).digest()
    header = [float(bool(problem)), float(int.from_bytes(digest[:HASH_BYTES], "little"))]
    first, rest = values[: SLOTS - len(header)], values[SLOTS - len(header) :]
    rows = _all_gather([*header, *first, *[0.0] * (SLOTS - len(header) - len(first))], group)
    if any(row[: len(header)] != [0.0, *header[1:]] for row in rows):
        _raise_what_differs(about, problem, group)
    gathered = [row[len(header) : len(header) + len(first)] for row in rows]
    if rest:
        gathered = [row + more for row, more in zip(gathered, _all_gather(rest, group), strict=True)]
    return gathered


def _raise_what_differs(about: str, problem: str, group: dist.ProcessGroup | None) -> NoReturn:
    told = dict(zip(ranks_of(group), all_gather_object((about, problem), group), strict=True))
    if problems := [f"{about}: {problem} on rank {rank}." for rank, (about, problem) in told.items() if problem]:
        raise ValueError("\n".join(problems))
    listed = "".join(f"\n  rank {rank}: {about}" for rank, (about, _) in told.items())
    raise ValueError(f"The ranks did not make the same call:{listed}")


def _all_gather(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    sent = torch.tensor(values, dtype=torch.float64, device=_message_device(group))
    received = [torch.empty_like(sent) for _ in ranks_of(group)]
    dist.all_gather(received, sent, group=group)
    return [row.tolist() for row in received]


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a message of a few bytes has to lie for ``group``: on the CPU, if that is one of its backends."""
    on_cpu = "cpu" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else current_world().device


def _largest(values: Iterable[float]) -> float:
    """NaN, if one of them is."""
    return max(values, key=lambda value: (math.isnan(value), value))


def _least(values: Iterable[float]) -> float:
    """NaN, if one of them is."""
    return min(values, key=lambda value: (not math.isnan(value), value))


def _problem_of(weight: float) -> str:
    """Why it is no weight; empty if it is one."""
    is_weight = isinstance(weight, numbers.Real) and 0 <= weight < math.inf
    return "" if is_weight else f"weight={weight!r} is not a number from 0 up"


def _total(weights: Sequence[float], about: str) -> float:
    if total := sum(weights):
        return total
    raise ValueError(f"{about}: the weights of all ranks are 0, so there is no mean.")


def _plain(value: Any) -> Any:
    """A tensor of one element as a Python number; anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _number(value: Any) -> float:
    """Raises ValueError if it is none, or an integer that float64 does not hold."""
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        what = f"a tensor of shape {tuple(plain.shape)}" if isinstance(plain, torch.Tensor) else repr(plain)
        raise ValueError(f"is {what}, not one number")
    if isinstance(plain, numbers.Integral) and abs(int(plain)) > WHOLE_UP_TO:
        raise ValueError(f"is {plain}: beyond 2**53, float64 skips integers")
    return float(plain)
