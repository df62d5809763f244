"""Training on every rank: prepare the model, accumulate gradients, seed, average.

Each is a thin layer over torch, and with one rank what torch does alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._engine.devices import accelerators
from .._engine.ranks.blocks import block
from .._engine.ranks.context import current_world
from .._engine.ranks.membership import join_launched_world
from ..ddp import initialize_ddp
from ._random_numbers import seed_random_numbers
from .collectives import as_bytes, gather_alike

STRATEGIES = ("ddp", "fsdp", "dp", "none")
COMPRESSIONS = (None, "fp16", "bf16", "powersgd")
WRAPPERS = (DistributedDataParallel, DataParallel)
# Numbers that gloo or NCCL has no name for. They can be sent as bytes, which is enough for a copy; DDP sends none so.
NOT_SENT = {torch.int16, torch.uint16, torch.uint32, torch.uint64}
NOT_SENT |= {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
logger = logging.getLogger("nn_parallel")


def prepare_model(
    model: nn.Module,
    *,
    strategy: Literal["ddp", "fsdp", "dp", "none"] = "ddp",
    sync_batchnorm: bool = False,
    compression: Literal["fp16", "bf16", "powersgd"] | None = None,
    **options: Any,
) -> nn.Module:
    """Move ``model`` to this rank's device and have its gradients averaged over the ranks. Alone, just move it.

    Args:
        strategy: ``"ddp"``: a copy on each rank, as `DistributedDataParallel`. ``"fsdp"``: each rank holds a part of
            every parameter, as `fully_shard`, each repeated block of the model a unit of its own. ``"dp"``: one
            process for all its accelerators, as `nn.DataParallel`. ``"none"``: moved, not wrapped.
        sync_batchnorm: normalise over the batches of all ranks; on accelerators only, as torch's `SyncBatchNorm`.
        compression: of the gradients on their way, ``"fp16"``, ``"bf16"`` or ``"powersgd"``, by torch's hooks for DDP.
        options: for `DistributedDataParallel`, as ``find_unused_parameters=True``, or for `fully_shard`, as
            ``mp_policy``, ``reshard_after_forward`` and ``offload_policy``.

    Returns:
        The model to call; `unwrap_model` gives the one inside. Its parameters and buffers are those of rank 0, but with
        ``strategy="none"``. A model with nothing to train is not wrapped, and has those of rank 0 too; called with
        gradients after some of it has been unfrozen, it raises RuntimeError: prepare it again then. Buffers and frozen
        parameters of integers and floats that gloo or NCCL does not know (int16, unsigned ones from 16 bits, float8)
        are those of rank 0 now, and are not sent again in each forward.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: there is no such strategy or compression, or they do not go together; the model is prepared already.
        RankError: on every rank, where there are several: one failed.

    Example::

        model = prepare_model(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # made after it: "fsdp" replaces the parameters
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_model() takes a torch.nn.Module, not {model!r}: perhaps it is to be called first.")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is none of {', '.join(STRATEGIES)}.")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression!r} is none of fp16, bf16, powersgd.")
    if compression and strategy != "ddp":
        raise ValueError(f"compression={compression!r} is for strategy='ddp', not for strategy={strategy!r}.")
    if options and strategy not in ("ddp", "fsdp"):
        raise ValueError(f"{', '.join(options)}: for strategy='ddp' or 'fsdp', not for strategy={strategy!r}.")
    if strategy != "none":
        _check_unprepared(model)
        _forget_frozen(model)
    world = initialize_ddp()
    if strategy == "dp" and world.world_size > 1:
        raise ValueError(f"strategy='dp' is for one process, and there are {world.world_size} ranks: use 'ddp'.")
    if sync_batchnorm and world.world_size > 1:
        if world.device.type == "cpu":
            logger.info("sync_batchnorm: torch has none on the CPU, so each rank normalises over its own batch.")
        else:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if strategy == "dp":
        others = [device for device in accelerators() if device != world.device]
        return DataParallel(model.to(world.device), [world.device, *others] if others else None)
    if strategy == "none" or world.world_size == 1:
        return model.to(world.device)
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    with block("prepare_model()"):
        model = model.to(world.device)
        if strategy == "fsdp" or not is_trained:  # DDP does it by itself
            _broadcast(itertools.chain(model.parameters(), model.buffers()))
        if strategy == "fsdp":
            return _shard(model, options)
        if not is_trained:
            model.register_forward_pre_hook(_raise_if_unfrozen)
            return model
        _send_what_ddp_cannot(model)
        device_ids = None if world.device.type == "cpu" else [world.device.index]
        wrapped = DistributedDataParallel(model, **({"device_ids": device_ids} | options))
        if compression is not None:
            _compress(wrapped, compression)
        return wrapped


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model itself, without DDP, DataParallel or ``torch.compile`` around it.

    Example::

        torch.save(unwrap_model(model).state_dict(), "model.pt")
    """
    inner: Any = model
    while inner is not None:
        model = inner
        inner = getattr(inner, "module" if isinstance(inner, WRAPPERS) else "_orig_mod", None)
    return model


@contextlib.contextmanager
def accumulate(model: nn.Module, step: int, every: int, *, last: bool = False) -> Iterator[bool]:
    """Around forward and backward of micro-step ``step`` (from 0): gradients are sent once in ``every`` of them.

    They add up, so divide each loss by the number of micro-steps: ``every``, or those that are left at the end of an
    epoch. With ``strategy="fsdp"`` they are sent each time: gradients that are not sent would be whole on every rank.

    Args:
        last: this is the last micro-step of the epoch; the gradients are sent, however few came together.

    Yields:
        Whether this is the last of its ``every``: after the block the optimizer makes its step.

    Raises:
        ValueError: ``every`` is below one.

    Example::

        for step, (x, y) in enumerate(loader):
            with accumulate(model, step, every=4, last=step == len(loader) - 1) as complete:
                (loss_fn(model(x), y) / 4).backward()
            if complete:
                optimizer.step()
                optimizer.zero_grad()
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1.")
    complete = last or (step + 1) % every == 0
    with contextlib.nullcontext() if complete else getattr(model, "no_sync", contextlib.nullcontext)():
        yield complete


def seed_everything(seed: int, *, per_rank: bool = True) -> int:
    """Seed the random numbers of Python, NumPy and torch on every device, with another seed on every rank.

    The workers of a `DataLoader` take theirs from torch's, so they differ too.

    Args:
        per_rank: add the rank, so that augmentation and dropout differ. The models are alike nevertheless: DDP sends
            the parameters of rank 0 to all.

    Returns:
        The seed of this rank.

    Example::

        seed_everything(0)  # 0 on rank 0, 1 on rank 1
    """
    join_launched_world()
    if per_rank:
        seed += current_world().rank
    seed_random_numbers(seed)
    torch.manual_seed(seed)  # on every device
    return seed


def average_parameters(
    model: nn.Module, *, weight: float | torch.Tensor = 1.0, group: dist.ProcessGroup | None = None
) -> None:
    """Replace the parameters and buffers of ``model``, in place, by their averages over the ranks.

    For ranks that train for themselves for a while, as clients do (federated averaging, McMahan et al., 2017) or in
    local SGD.

    Args:
        weight: how much this rank counts, as the number of its samples; one of weight 0 only receives.
        group: the ranks that take part; all if None.

    Raises:
        ValueError: on every rank: the models differ in shape, or are sharded, so that there is only one; the weights
            add up to nothing, or one is no number.

    Example::

        for _ in range(local_steps):
            train_step(model)
        average_parameters(model, weight=len(my_samples))
    """
    inner = unwrap_model(model)
    tensors = list(itertools.chain(inner.parameters(), inner.buffers()))
    problem = "the model is sharded: the ranks hold parts of one, and not one each" if _is_sharded(inner) else ""
    _average("average_parameters", tensors, weight, problem, group)


def sync_buffers(model: nn.Module, *, average: bool = False) -> None:
    """Give every rank the same buffers, in place, as the running statistics of batch norm. Every rank calls it.

    Each rank gathers those of its own batches. A model in DDP takes the buffers of rank 0 in each forward; the model
    inside, `unwrap_model`, does not, so each rank would evaluate another model, and none the one of the checkpoint.

    Args:
        average: take the averages over the ranks; if False, the buffers of rank 0, which are those that
            `save_checkpoint` saves.

    Raises:
        ValueError: on every rank: the buffers to average differ in shape.
        RankError: on every rank, where there are several: one failed.

    Example::

        sync_buffers(model, average=True)
        metrics = evaluate(unwrap_model(model))  # the same model on every rank
    """
    buffers = list(unwrap_model(model).buffers())
    if average:
        _average("sync_buffers", buffers, weight=1.0)
    elif initialize_ddp().world_size > 1:
        with block("sync_buffers()"):
            _broadcast(buffers)


def _average(
    call: str,
    tensors: list[torch.Tensor],
    weight: float | torch.Tensor,
    problem: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace ``tensors``, in place, by their averages over the ranks; one of weight 0 only receives."""
    layout = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    size = sum(tensor.numel() for tensor in tensors)
    about = f"{call} of {size} numbers in {len(tensors)} tensors ({zlib.crc32(layout.encode()):08x})"
    _, weights = gather_alike([], about, problem, weight, group)
    if current_world().world_size == 1:
        return
    share = float(weight) / sum(weights)
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for (dtype, _), alike in kinds.items():
        flat = torch.cat([tensor.flatten() for tensor in alike])
        if not dtype.is_complex:
            flat = flat.to(torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64)
        flat = flat * share if share else torch.zeros_like(flat)  # 0 * NaN would be NaN
        dist.all_reduce(flat, group=group)
        if not dtype.is_floating_point and not dtype.is_complex:
            flat = flat.round()
        for tensor, mean in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite ``tensors``, of any dtype, by those of rank 0."""
    for tensor in tensors:
        numbers = tensor.detach().resolve_conj().contiguous()
        dist.broadcast(as_bytes(numbers), src=0)
        tensor.detach().copy_(numbers)


def _send_what_ddp_cannot(model: nn.Module) -> None:
    """Overwrite by those of rank 0 what is `NOT_SENT`, and hide it from DDP: buffers, and frozen parameters."""
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    unknown = {name for name, tensor in tensors.items() if tensor.dtype in NOT_SENT and not tensor.requires_grad}
    if unknown:
        _broadcast(tensors[name] for name in sorted(unknown))
        hidden = unknown.union(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        hide: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        hide(model, sorted(hidden))


def _raise_if_unfrozen(model: nn.Module, _: Any) -> None:
    """Raise in the forward of a model that had nothing to train when it was prepared, and has now."""
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        raise RuntimeError(
            f"The {type(model).__name__} had nothing to train when prepare_model() was called, so its gradients would "
            "not be averaged over the ranks. Call prepare_model() again, now that some parameters require gradients."
        )


def _forget_frozen(model: nn.Module) -> None:
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _raise_if_unfrozen:
            del model._forward_pre_hooks[number]


def _compress(model: DistributedDataParallel, compression: Literal["fp16", "bf16", "powersgd"]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)  # the least that torch allows with warm starts
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        model.register_comm_hook(None, hooks[compression])


def _check_unprepared(model: nn.Module) -> None:
    """Raise if `prepare_model` has wrapped ``model`` or a part of it: its gradients would be averaged twice."""
    for module in model.modules():
        if isinstance(module, WRAPPERS):
            name = type(module).__name__
            raise ValueError(f"The model is prepared already, there is a {name} in it: pass unwrap_model(model).")
    if _is_sharded(unwrap_model(model)):
        raise ValueError("The model is prepared already, it is sharded, and stays so: make another and load its state.")


def _is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # which `fully_shard` adds


def _shard(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if "mesh" not in options:  # torch would take one of accelerators, where there are any
        world = current_world()
        options = options | {"mesh": init_device_mesh(world.device.type, (world.world_size,))}
    for part in _repeated_blocks(model):
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that have modules inside and are in a container beside others of their class."""
    children = list(module.children())
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = Counter(type(child) for child in children)
    for child in children:
        if is_container and kinds[type(child)] > 1 and any(child.children()):
            yield child
        else:
            yield from _repeated_blocks(child)
