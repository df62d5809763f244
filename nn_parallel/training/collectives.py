"""Collectives on objects, tensors and metrics, by way of torch's own.

Calls that do not match are an error on every rank: each rank first says what its call is about, by `all_gather_object`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from .._engine.pickling import dumps
from .._engine.ranks.context import current_world
from .._engine.ranks.exchange import all_gather_packed, ranks_of
from ..ddp import initialize_ddp
from ..errors import TransferError

T = TypeVar("T")
Name = TypeVar("Name", str, int)  # of a metric
REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}


def reduce_metrics(
    metrics: Mapping[Name, float | torch.Tensor],
    *,
    weight: float | torch.Tensor = 1.0,
    op: Literal["mean", "sum", "max", "min"] = "mean",
    group: dist.ProcessGroup | None = None,
) -> dict[Name, float]:
    """Return each metric over all ranks, by one gather of objects for all of them.

    Args:
        metrics: numbers, or tensors or arrays of one element, under the same names on every rank. Names are text or
            integers, as the numbers of classes.
        weight: how much this rank counts in the mean: the number of its samples, if the metrics are means over them. A
            number or a tensor of one element. A rank of weight 0 counts nothing, whatever its metrics say.
        op: ``"mean"``, weighted; ``"sum"``, ``"max"`` or ``"min"``.
        group: the ranks that take part; all if None.

    Returns:
        The metrics, the same on every rank: floats, but those that are integers on every rank stay integers under sum,
        max and min. A metric that is NaN on one rank is NaN.

    Raises:
        ValueError: on every rank: the names differ, a metric is no number, or the weights add up to nothing. There is
            no such ``op``.

    Example::

        reduce_metrics({"loss": 0.5}, weight=len(batch))     # {'loss': 0.5}
        reduce_metrics({"correct": 12, "of": 16}, op="sum")  # {'correct': 24, 'of': 32} on two ranks
    """
    if op != "mean" and op not in REDUCTIONS:
        raise ValueError(f"op={op!r} is none of mean, sum, max, min.")
    if op != "mean" and weight != 1.0:
        raise ValueError(f"weight={weight} is for op='mean': op={op!r} counts every rank alike.")
    names = sorted(metrics, key=lambda name: (type(name).__name__, name))
    values: list[float] = []
    problem = ""
    for name in names:
        try:
            values.append(_number(metrics[name]))
        except ValueError as error:
            problem = problem or f"the metric {name!r} {error}"
    about = f"reduce_metrics(op={op!r}) of {', '.join(map(repr, names)) or 'nothing'}"
    rows, weights = gather_alike(values, about, problem, weight, group)
    reduced: dict[Name, float] = {}
    total = sum(weights)
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        if op == "mean":
            weighted = zip(column, weights, strict=True)
            reduced[name] = sum(value * weight for value, weight in weighted if weight) / total
        elif all(isinstance(value, int) for value in column):
            reduced[name] = REDUCTIONS[op](column)
        else:
            reduced[name] = math.nan if any(map(math.isnan, column)) else float(REDUCTIONS[op](column))
    return {name: reduced[name] for name in metrics}


def any_rank(flag: object) -> bool:
    """Return whether ``flag`` is true on any rank; the same answer on all. Every rank calls this.

    Example::

        if any_rank(loss != loss):  # one rank has seen NaN: all stop
            break
    """
    return bool(reduce_metrics({"flag": int(bool(flag))}, op="max")["flag"])


def all_ranks(flag: object) -> bool:
    """Return whether ``flag`` is true on all ranks; the same answer on all. Every rank calls this.

    Example::

        if all_ranks(epochs_without_improvement > patience):
            break
    """
    return not any_rank(not flag)


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the ``obj`` of every rank, on every rank, in rank order. Alone: a list of one.

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
    answers = zip(ranks_of(group), gathered, strict=True)
    if problems := [f"Rank {rank}: {problem}" for rank, (_, problem) in answers if problem]:
        raise TransferError("\n".join(problems))
    return [obj for obj, _ in gathered]


def all_gather_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along dim 0 in rank order, on every rank. No gradient flows.

    Args:
        tensor: of shape (n, ...); n may differ between the ranks and be 0, the rest may not. One without dimensions
            counts as one of shape (1,).
        group: the ranks that take part; all if None.

    Returns:
        A tensor of shape (sum of all n, ...), on the device of ``tensor``: each row once, nothing is padded.

    Raises:
        ValueError: on every rank: dtypes or the other dimensions differ, or one is no tensor, or a sparse, nested or
            quantized one.

    Example::

        predictions = all_gather_tensor(model(x).argmax(dim=1))  # 7 samples here, 6 there: shape (13,)
    """
    problem = _why_not_gathered(tensor)
    # A conjugate or negative view is a flag on the numbers of another tensor, and only numbers are sent.
    mine = torch.empty(0) if problem else tensor.detach().resolve_conj().resolve_neg()
    mine = mine if mine.dim() else mine[None]
    if initialize_ddp().world_size == 1 and not problem:
        return mine
    about = f"all_gather_tensor of rows of shape {tuple(mine.shape[1:])} and dtype {mine.dtype}"
    rows, _ = gather_alike([len(mine), mine.device.type], about, problem, group=group)
    counts, device_types = zip(*rows, strict=True)
    row_bytes = mine.element_size() * math.prod(mine.shape[1:])
    device = mine.device if can_gather(set(device_types), dist.get_backend_config(group)) else _message_device(group)
    sent = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=device)
    sent[: len(mine) * row_bytes] = as_bytes(mine).to(device)
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent, group=group)
    parts = [part[: count * row_bytes] for part, count in zip(received, counts, strict=True)]
    return torch.cat(parts).to(mine.device).view(mine.dtype).view(sum(counts), *mine.shape[1:])


def _why_not_gathered(tensor: Any) -> str:
    """Return why `all_gather_tensor` does not take ``tensor``; empty if it does."""
    if not isinstance(tensor, torch.Tensor):
        return f"got a {type(tensor).__name__}, not a tensor"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        return f"got a {kind} tensor, which has no rows of one size"
    return ""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of ``tensor``, of any dtype, as bytes, of shape (count,); a view if it is contiguous."""
    # A contiguous tensor of one element may have any stride, and torch cannot view that as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def can_gather(device_types: set[str], backends: str) -> bool:
    """Return whether tensors on such devices are gathered where they are; ``backends`` as ``cpu:gloo,cuda:nccl``.

    Not by gloo, which would copy them to the CPU.
    """
    backend_of = dict(pair.split(":") for pair in backends.split(","))
    return len(device_types) == 1 and backend_of.get(min(device_types), "gloo") != "gloo"


def gather_alike(
    mine: list[Any],
    about: str,
    problem: str = "",
    weight: float | torch.Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[list[Any]], list[float]]:
    """Return what every rank gives, and its weight, in rank order.

    Args:
        mine: plain numbers and text.
        about: what it is, which must be the same on all ranks.
        problem: why what this rank gives must not be used.

    Raises:
        ValueError: on every rank: there is a ``problem`` on one, ``about`` differs, a weight is negative or no number,
            or all are 0.
    """
    try:
        number = _number(weight)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        problem = f"weight={weight!r} is not a number from 0 up"
    messages: list[Any] = [(about, problem, mine, float(number))]
    if initialize_ddp().world_size > 1:
        message = messages[0]
        messages = [None] * len(ranks_of(group))
        dist.all_gather_object(messages, message, group=group)
    received = dict(zip(ranks_of(group), messages, strict=True))
    if problems := [f"{about}: {why} on rank {rank}." for rank, (about, why, *_) in received.items() if why]:
        raise ValueError("\n".join(problems))
    if len({about for about, *_ in received.values()}) > 1:
        listed = "".join(f"\n  rank {rank}: {about}" for rank, (about, *_) in received.items())
        raise ValueError(f"The calls of the ranks do not match:{listed}")
    _, _, rows, weights = map(list, zip(*received.values(), strict=True))
    if not any(weights):
        raise ValueError(f"{about}: the weights of all ranks are 0, so there is no mean.")
    return rows, weights


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for a message of a few bytes to ``group``: the CPU, if that is one of its backends."""
    on_cpu = "cpu" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else current_world().device


def _number(value: Any) -> float:
    """Return a metric as Python's int or float. Raises ValueError if it is not one number."""
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)  # of an array of NumPy
    plain = value.item() if size == 1 else value
    if isinstance(plain, numbers.Real):
        return int(plain) if isinstance(plain, numbers.Integral) else float(plain)
    what = f"a tensor of shape {tuple(plain.shape)}" if isinstance(plain, torch.Tensor) else repr(plain)
    raise ValueError(f"is {what}, not one number")
