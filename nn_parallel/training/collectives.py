"""Collectives on objects, tensors and metrics, built on torch's own collectives.

If the ranks give tensors of different shapes to a collective of torch, the result may be wrong, or the ranks may wait
for ever. So for metrics and tensors each rank first sends a description of its call to all ranks (`gather_alike`). If
the descriptions differ, every rank raises the same error.
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
Name = TypeVar("Name", str, int)  # the name of a metric
REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}


def reduce_metrics(
    metrics: Mapping[Name, float | torch.Tensor],
    *,
    weight: float | torch.Tensor = 1.0,
    op: Literal["mean", "sum", "max", "min"] = "mean",
    group: dist.ProcessGroup | None = None,
) -> dict[Name, float]:
    """Return the mean, sum, maximum or minimum of each metric over all ranks. All ranks of ``group`` call it.

    One collective serves for all metrics together.

    Args:
        metrics: numbers, or tensors or arrays of one element, under the same names on every rank. A name is a string or
            an integer, such as the number of a class.
        weight: the weight of this rank in the mean, as a number or a tensor of one element. If the metrics are means
            over samples, it is the number of samples. If it is 0, the metrics of this rank have no influence.
        op: ``"mean"`` for the weighted mean, ``"sum"``, ``"max"`` or ``"min"``.
        group: the ranks that take part; all ranks if None.

    Returns:
        The metrics, the same on every rank, as floats. A sum, maximum or minimum is an integer if the metric is an
        integer on every rank. A metric that is NaN on one rank is NaN.

    Raises:
        ValueError: on every rank: the names differ, a metric is not a number, or all weights are 0. On this rank: there
            is no such ``op``, or ``weight`` was given for another ``op`` than ``"mean"``.

    Example::

        reduce_metrics({"loss": 0.5}, weight=len(batch))     # {'loss': 0.5}
        reduce_metrics({"correct": 12, "of": 16}, op="sum")  # {'correct': 24, 'of': 32} on two ranks
    """
    if op != "mean" and op not in REDUCTIONS:
        raise ValueError(f"op={op!r} must be one of mean, sum, max, min.")
    if op != "mean" and weight != 1.0:
        raise ValueError(f"weight={weight} is for op='mean' only, because op={op!r} counts all ranks alike.")
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
    """Return whether ``flag`` is true on any rank. Every rank calls this function and gets the same answer.

    Example::

        if any_rank(loss != loss):  # the loss of one rank is NaN, so all ranks stop
            break
    """
    return bool(reduce_metrics({"flag": int(bool(flag))}, op="max")["flag"])


def all_ranks(flag: object) -> bool:
    """Return whether ``flag`` is true on all ranks. Every rank calls this function and gets the same answer.

    Example::

        if all_ranks(epochs_without_improvement > patience):
            break
    """
    return not any_rank(not flag)


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return on every rank a list with the ``obj`` of each rank, in rank order. In a world of one rank: ``[obj]``.

    Args:
        obj: any object that can be pickled, including functions and classes of ``__main__``.
        group: the ranks that take part; all ranks if None.

    Raises:
        TransferError: on every rank: an object cannot be pickled or cannot be rebuilt.

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
    """Return on every rank the tensors of all ranks, concatenated along dim 0 in rank order.

    No gradient flows through this function.

    Args:
        tensor: a tensor of shape (n, ...). n may be different on each rank and may be 0; the other dimensions must be
            the same on all ranks. A tensor without dimensions counts as a tensor of shape (1,).
        group: the ranks that take part; all ranks if None.

    Returns:
        A tensor of shape (sum of all n, ...), on the device of ``tensor``. It holds each row once, without padding.

    Raises:
        ValueError: on every rank: the dtypes or the other dimensions differ, or an argument is not a tensor, or is a
            sparse, nested or quantized tensor.

    Example::

        predictions = all_gather_tensor(model(x).argmax(dim=1))  # 7 samples on one rank, 6 on another: shape (13,)
    """
    problem = _why_not_gathered(tensor)
    # Only bytes are sent, without the flag of a conjugate or negative view. So apply the flag to the numbers first.
    own = torch.empty(0) if problem else tensor.detach().resolve_conj().resolve_neg()
    own = own if own.dim() else own[None]
    if initialize_ddp().world_size == 1 and not problem:
        return own
    about = f"all_gather_tensor of rows of shape {tuple(own.shape[1:])} and dtype {own.dtype}"
    rows, _ = gather_alike([len(own), own.device.type], about, problem, group=group)
    counts, device_types = zip(*rows, strict=True)
    row_bytes = own.element_size() * math.prod(own.shape[1:])
    device = own.device if can_gather(set(device_types), dist.get_backend_config(group)) else _message_device(group)
    sent = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=device)  # torch gathers only equal sizes
    sent[: len(own) * row_bytes] = as_bytes(own).to(device)
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent, group=group)
    parts = [part[: count * row_bytes] for part, count in zip(received, counts, strict=True)]
    return torch.cat(parts).to(own.device).view(own.dtype).view(sum(counts), *own.shape[1:])


def _why_not_gathered(tensor: Any) -> str:
    """Return the reason why `all_gather_tensor` refuses ``tensor``, or an empty string if it accepts the tensor."""
    if not isinstance(tensor, torch.Tensor):
        return f"got a {type(tensor).__name__}, not a tensor"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        return f"got a {kind} tensor, which has no rows of one size"
    return ""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, which may have any dtype, as a tensor of dtype uint8 with one dimension.

    If ``tensor`` is contiguous, the result is a view of ``tensor``.
    """
    # A contiguous tensor of one element may have any stride, but torch views only a tensor of stride 1 as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def can_gather(device_types: set[str], backends: str) -> bool:
    """Return whether `all_gather_tensor` can send the tensors from their own devices, without a copy to the CPU.

    It cannot in two cases: the ranks have their tensors on devices of different types, or the backend for these devices
    is gloo, which would itself copy the tensors to the CPU.

    Args:
        device_types: the types of the devices on which the ranks have their tensors.
        backends: the backend for each type of device, as in ``cpu:gloo,cuda:nccl``.
    """
    backend_of = dict(pair.split(":") for pair in backends.split(","))
    return len(device_types) == 1 and backend_of.get(min(device_types), "gloo") != "gloo"


def gather_alike(
    values: list[Any],
    about: str,
    problem: str = "",
    weight: float | torch.Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[list[Any]], list[float]]:
    """Check that all ranks make the same call, and return the ``values`` and the weight of each rank in rank order.

    All ranks of ``group`` call this function. If one rank has a problem, every rank raises an error that names this
    rank and its problem.

    Args:
        values: plain numbers and strings.
        about: a description of the call, which must be the same on all ranks.
        problem: the reason why the values of this rank must not be used; an empty string if they can be used.
        weight: the weight of this rank.
        group: the ranks that take part; all ranks if None.

    Raises:
        ValueError: on every rank: a rank has a ``problem``, the descriptions differ, a weight is negative or not a
            number, or all weights are 0.
    """
    try:
        number = _number(weight)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        problem = f"weight={weight!r} is not a number of at least 0"
    messages: list[Any] = [(about, problem, values, float(number))]
    if initialize_ddp().world_size > 1:
        message = messages[0]
        messages = [None] * len(ranks_of(group))
        dist.all_gather_object(messages, message, group=group)
    received = dict(zip(ranks_of(group), messages, strict=True))
    if problems := [f"{about}: {why} on rank {rank}." for rank, (about, why, *_) in received.items() if why]:
        raise ValueError("\n".join(problems))
    if len({about for about, *_ in received.values()}) > 1:
        listed = "".join(f"\n  rank {rank}: {about}" for rank, (about, *_) in received.items())
        raise ValueError(f"The calls of the ranks do not match. Every rank must make the same call:{listed}")
    _, _, rows, weights = map(list, zip(*received.values(), strict=True))
    if not any(weights):
        raise ValueError(f"{about}: the weights of all ranks are 0, so there is no mean.")
    return rows, weights


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for a tensor that is sent to ``group``: the CPU if the group has a backend for the CPU."""
    on_cpu = "cpu" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else current_world().device


def _number(value: Any) -> float:
    """Return a metric as a Python int or float.

    Raises:
        ValueError: the metric is not one number.
    """
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)  # NumPy has `size`
    plain = value.item() if size == 1 else value
    if isinstance(plain, numbers.Real):
        return int(plain) if isinstance(plain, numbers.Integral) else float(plain)
    what = f"a tensor of shape {tuple(plain.shape)}" if isinstance(plain, torch.Tensor) else repr(plain)
    raise ValueError(f"is {what}, not one number")
