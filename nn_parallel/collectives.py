"""Collectives on objects, tensors and metrics, by way of torch's own.

What differs between the ranks where it must not is an error on every rank. So each message says what it is about, in a
shape that does not depend on that.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from .ddp import initialize_ddp
from .errors import TransferError
from .pickling import Packed, dumps, loads
from .world import current_world

T = TypeVar("T")
SLOTS = 64  # of the first message of `all_reduce_values`: what it is about and the first values
HASH_BITS = 20  # of each of two hashes: their squares, summed over thousands of ranks, are exact in float64
WHOLE_UP_TO = 2**53  # float64 holds every integer up to this one


def reduce_metrics(
    metrics: Mapping[str, float | torch.Tensor],
    *,
    weight: float = 1.0,
    op: str = "mean",
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Each metric over all ranks, by one all_reduce for all of them, in float64.

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
        ValueError: on every rank: the names differ, a metric is no number, the weights add up to nothing, or integers
            are too large to be exact. There is no such ``op``.

    Example::

        reduce_metrics({"loss": 0.5}, weight=len(batch))     # {'loss': 0.5}
        reduce_metrics({"correct": 12, "of": 16}, op="sum")  # {'correct': 24, 'of': 32} on two ranks
    """
    if op not in ("mean", "sum", "max", "min"):
        raise ValueError(f"op={op!r} is none of mean, sum, max, min.")
    if op != "mean" and weight != 1.0:
        raise ValueError(f"weight={weight} is for op='mean': op={op!r} counts every rank alike.")
    names, values, problem = sorted(metrics), list[float](), ""
    is_float = [float(not isinstance(_plain(metrics[name]), numbers.Integral)) for name in names]
    for name in names:
        try:
            values.append(_number(metrics[name]))
        except ValueError as error:
            values.append(0.0)
            problem = problem or f"the metric {name!r} {error}"
    about = f"reduce_metrics(op={op!r}) of {', '.join(names) or 'nothing'}"
    if op == "mean":
        reduced, _ = weighted_mean(values, weight, about, problem, group)
    elif op == "sum":
        reduced = all_reduce_values([*values, *is_float], about, problem, group=group)
    else:
        reduced = _largest(values, is_float, 1 if op == "max" else -1, about, problem, group)
    result = dict(zip(names, reduced[: len(names)], strict=True))
    for name, has_floats in zip(names, reduced[len(names) :], strict=False):  # a mean is one in any case
        if not has_floats:
            if abs(result[name]) > WHOLE_UP_TO:
                raise ValueError(f"The {op} of {name!r} is beyond 2**53, where float64 skips integers.")
            result[name] = int(result[name])
    return {name: result[name] for name in metrics}


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
    told = zip(_ranks(group), gathered, strict=True)
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
            for rank, count, row, dtype in zip(_ranks(group), counts, *rows, strict=True)
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


def weighted_mean(
    values: Sequence[float], weight: float, about: str, problem: str, group: dist.ProcessGroup | None
) -> tuple[list[float], float]:
    """The means of ``values`` over the ranks, and the sum of the weights; for the rest see `all_reduce_values`.

    Raises:
        ValueError: on every rank: a weight is negative or no number, or all are 0.
    """
    if not isinstance(weight, numbers.Real) or not 0 <= weight < math.inf:
        problem, weight = problem or f"weight={weight!r} is not a number from 0 up", 0.0
    weighted = (weight * value if weight else 0.0 for value in values)
    *sums, total = all_reduce_values([*weighted, weight], about, problem, group=group)
    if total == 0:
        raise ValueError(f"{about}: the weights of all ranks are 0, so there is no mean.")
    return [summed / total for summed in sums], total


def all_reduce_values(
    values: Sequence[float],
    about: str,
    problem: str = "",
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """The ``values`` of all ranks reduced in float64: one all_reduce, two where there are more than fit into the first.

    Args:
        about: what the values are, which must be the same on all ranks; of another text they may differ in number.
        problem: why the values of this rank must not be used.
        op: ``SUM`` or ``MAX``.

    Raises:
        ValueError: on every rank: there is a ``problem`` on one, or ``about`` differs.
    """
    if initialize_ddp().world_size == 1:
        if problem:
            raise ValueError(f"{about}: {problem}.")
        return list(values)
    digest = hashlib.sha256(f"{len(values)} {about}".encode()).digest()
    hashes = [int.from_bytes(digest[at : at + 4], "little") >> (32 - HASH_BITS) for at in (0, 4)]
    # Numbers are equal on all ranks if their maximum is their minimum; with sums, if their squares add up to no more
    # than they must by the inequality of Cauchy and Schwarz.
    twins = [-number if op == dist.ReduceOp.MAX else number * number for number in hashes]
    header = [float(bool(problem)), *hashes, *twins]
    first, rest = values[: SLOTS - len(header)], values[SLOTS - len(header) :]
    reduced = _all_reduce([*header, *first, *[0.0] * (SLOTS - len(header) - len(first))], op, group)
    count = dist.get_world_size(group)
    is_good = reduced[0] == 0
    for number, twin in zip(reduced[1:3], reduced[3:5], strict=True):
        is_good &= number == -twin if op == dist.ReduceOp.MAX else int(number) ** 2 == count * int(twin)
    if not is_good:
        _raise_what_differs(about, problem, group)
    return [*reduced[len(header) : len(header) + len(first)], *(_all_reduce(rest, op, group) if rest else ())]


def broadcast_packed(packed: Packed | None, src: int) -> Any:
    """What rank ``src`` packed, rebuilt on the others, which pass None. Makes the process group if there is none.

    Raises:
        TransferError: it cannot be unpickled here.
    """
    initialize_ddp()
    box = [_sendable(packed) if packed is not None else None]
    dist.broadcast_object_list(box, src=src)
    return _rebuilt(box[0], src) if packed is None else None


def all_gather_packed(packed: Packed, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank packed, rebuilt on every rank, in rank order. Makes the process group if there is none.

    Raises:
        TransferError: one of them cannot be unpickled here.
    """
    initialize_ddp()
    ranks = _ranks(group)
    boxes: list[Any] = [None] * len(ranks)
    dist.all_gather_object(boxes, _sendable(packed), group=group)
    return [_rebuilt(box, rank) for rank, box in zip(ranks, boxes, strict=True)]


def _raise_what_differs(about: str, problem: str, group: dist.ProcessGroup | None) -> NoReturn:
    told = dict(zip(_ranks(group), all_gather_object((about, problem), group), strict=True))
    if problems := [f"{about}: {problem} on rank {rank}." for rank, (about, problem) in told.items() if problem]:
        raise ValueError("\n".join(problems))
    listed = "".join(f"\n  rank {rank}: {about}" for rank, (about, _) in told.items())
    raise ValueError(f"The ranks did not make the same call:{listed}")


def _all_reduce(values: Sequence[float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=_message_device(group))
    dist.all_reduce(tensor, op, group=group)
    reduced: list[float] = tensor.tolist()
    return reduced


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a message of a few bytes has to lie for ``group``: on the CPU, if that is one of its backends."""
    on_cpu = "cpu" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else current_world().device


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def _largest(
    values: Sequence[float],
    is_float: Sequence[float],
    sign: int,
    about: str,
    problem: str,
    group: dist.ProcessGroup | None,
) -> list[float]:
    """The maxima, with a negative ``sign`` the minima, and then those of ``is_float``.

    NaN travels beside: what is its maximum, libraries disagree.
    """
    signed = [-math.inf if math.isnan(value) else sign * value for value in values]
    flags = [float(math.isnan(value)) for value in values]
    reduced = all_reduce_values([*signed, *flags, *is_float], about, problem, op=dist.ReduceOp.MAX, group=group)
    count = len(values)
    pairs = zip(reduced[:count], reduced[count : 2 * count], strict=True)
    return [*(math.nan if is_nan else sign * value for value, is_nan in pairs), *reduced[2 * count :]]


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


def _sendable(packed: Packed) -> tuple[bytes, list[bytes]]:
    return packed.pickle, [bytes(buffer) for buffer in packed.buffers]


def _rebuilt(box: Any, src: int) -> Any:
    pickled, buffers = box
    try:
        return loads(pickled, [bytearray(buffer) for buffer in buffers])
    except (Exception, SystemExit) as error:  # a KeyboardInterrupt may be the user's
        raise TransferError(
            f"The result of rank {src} cannot be rebuilt here: {type(error).__name__}: {error}"
        ) from error
