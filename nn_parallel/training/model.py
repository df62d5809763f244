"""The model on every rank: prepare it, accumulate gradients, seed random numbers, average parameters and buffers.

Each function is a thin layer over torch. With one rank, it does what torch alone would do.
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
from .._engine.torch_private import ignore_parameters
from ..ddp import initialize_ddp
from ._random_numbers import seed_random_numbers
from .collectives import as_bytes, gather_alike

STRATEGIES = ("ddp", "fsdp", "dp", "none")
COMPRESSIONS = (None, "fp16", "bf16", "powersgd")
WRAPPERS = (DistributedDataParallel, DataParallel)
# DDP raises an exception if it must send a tensor of one of these dtypes, because gloo or NCCL does not support them.
# `_broadcast` can send such a tensor, because it sends bytes.
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
    """Move ``model`` to the device of this rank, and make its gradients averages over all ranks.

    In a world of one rank, the model is only moved.

    Args:
        model: the model.
        strategy: With ``"ddp"``, each rank has a copy of the model (`DistributedDataParallel`). With ``"fsdp"``, each
            rank holds a shard of every parameter (`fully_shard`). Each repeated block of the model, such as a layer of
            a transformer, is then an FSDP unit of its own. With ``"dp"``, one process uses all its accelerators
            (`nn.DataParallel`). With ``"none"``, the model is moved but not wrapped.
        sync_batchnorm: if True, batch norm uses the statistics of all ranks, through torch's `SyncBatchNorm`. This has
            an effect only on accelerators.
        compression: the compression of gradients when they are sent, through a communication hook of torch for DDP:
            ``"fp16"``, ``"bf16"`` or ``"powersgd"``.
        options: options of `DistributedDataParallel`, such as ``find_unused_parameters=True``, or of `fully_shard`,
            such as ``mp_policy``, ``reshard_after_forward`` and ``offload_policy``.

    Returns:
        The model to call. `unwrap_model` returns the model inside. Except with ``strategy="none"``, all ranks now have
        the parameters and buffers of rank 0. A model with nothing to train is not wrapped. If a part of such a model is
        unfrozen later, calling the model with gradients raises RuntimeError; then prepare the model again. DDP copies
        the buffers of rank 0 to the other ranks in each forward, except buffers of the dtypes that gloo or NCCL cannot
        send: int16, uint16, uint32, uint64 and float8.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: there is no such strategy or compression, they do not go together, or the model is prepared already.
        RankError: one of several ranks failed. Every rank raises this error.

    Example::

        model = prepare_model(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # after prepare_model(): "fsdp" replaces parameters
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_model() takes a torch.nn.Module, not {model!r}: call a class or function first.")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(STRATEGIES)}.")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression!r} must be one of fp16, bf16, powersgd.")
    if compression and strategy != "ddp":
        raise ValueError(f"compression={compression!r} is for strategy='ddp', not for strategy={strategy!r}.")
    if options and strategy not in ("ddp", "fsdp"):
        raise ValueError(f"{', '.join(options)}: only for strategy='ddp' or 'fsdp', not for strategy={strategy!r}.")
    if strategy != "none":
        _check_unprepared(model)
        _forget_frozen(model)
    world = initialize_ddp()
    if strategy == "dp" and world.world_size > 1:
        raise ValueError(f"strategy='dp' is for one process, but there are {world.world_size} ranks: use 'ddp'.")
    if sync_batchnorm and world.world_size > 1:
        if world.device.type == "cpu":
            logger.info("sync_batchnorm: torch has no SyncBatchNorm for the CPU, so each rank uses its own statistics.")
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
        if strategy == "fsdp" or not is_trained:  # in the other cases, DDP itself copies from rank 0
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
    """Return the model inside the wrappers of DDP, DataParallel and ``torch.compile``.

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
    """Accumulate gradients over several micro-steps. Use this context manager around each micro-step.

    A micro-step is the forward and backward of one batch. After every N micro-steps, the optimizer makes a step; N is
    the argument ``every``. Gradients are sent to the other ranks only in the last of these N micro-steps. The gradients
    of the micro-steps add up. So divide each loss by N, or by the number of micro-steps that are left if an epoch ends
    with fewer than N. With ``strategy="fsdp"`` gradients are sent in each micro-step, because gradients that are not
    sent would need the memory of a whole model on every rank.

    A checkpoint has no gradients. So save checkpoints only after the last of N micro-steps, after the optimizer's step.

    Args:
        model: the prepared model.
        step: the number of the micro-step, from 0.
        every: the number of micro-steps before each step of the optimizer.
        last: True for the last micro-step of the epoch. Gradients are then sent even if there were fewer than ``every``
            micro-steps.

    Yields:
        True if gradients are sent in this micro-step, so that the optimizer makes its step after the block.

    Raises:
        ValueError: ``every`` is less than 1.

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
    """Seed the random numbers of Python, NumPy and torch on every device, with a different seed on each rank.

    The workers of a `DataLoader` take their seeds from torch's random numbers, so their random numbers differ too.

    Args:
        seed: the seed of rank 0.
        per_rank: if True, add the rank to ``seed``, so that augmentation and dropout are different on each rank. The
            models are alike nevertheless, because DDP sends the parameters of rank 0 to all ranks. If False, all ranks
            have the same seed.

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

    The function is for ranks that train separately for a while, as in local SGD or in federated averaging (McMahan et
    al., 2017). All ranks of ``group`` call it.

    Args:
        model: the model of this rank, wrapped or not.
        weight: the weight of this rank in the average, such as the number of its samples. A rank of weight 0 only
            receives the averages.
        group: the ranks that take part; all ranks if None.

    Raises:
        ValueError: on every rank: the models differ in shape; the models are sharded, so that the ranks hold parts of
            one model; a weight is not a number; or all weights are 0.

    Example::

        for _ in range(local_steps):
            train_step(model)
        average_parameters(model, weight=len(my_samples))
    """
    inner = unwrap_model(model)
    tensors = list(itertools.chain(inner.parameters(), inner.buffers()))
    problem = "the model is sharded, so there is no whole model" if _is_sharded(inner) else ""
    _average("average_parameters", tensors, weight, problem, group)


def sync_buffers(model: nn.Module, *, average: bool = False) -> None:
    """Give all ranks the same buffers, in place. Every rank calls this function before an evaluation.

    Buffers, such as the running statistics of batch norm, depend on the batches of each rank. A DDP model takes the
    buffers of rank 0 in each forward, but the model inside the DDP model (`unwrap_model`) does not. So without this
    function each rank would evaluate a different model, and not the model in the checkpoint.

    Args:
        model: the model of this rank, wrapped or not.
        average: if True, all ranks get the averages of the buffers over the ranks. If False, all ranks get the buffers
            of rank 0, which `save_checkpoint` saves.

    Raises:
        ValueError: on every rank: the buffers to average differ in shape.
        RankError: one of several ranks failed. Every rank raises this error.

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
    """Replace ``tensors``, in place, by their averages over the ranks.

    Args:
        call: the name of the public function that the user has called, for error messages.
        tensors: the tensors of this rank.
        weight: the weight of this rank. If it is 0, this rank only receives.
        problem: the reason why this rank cannot take part, for example because its model is sharded. All ranks then
            raise a ValueError with this text. An empty string if this rank can take part.
        group: the ranks that take part; all ranks if None.
    """
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
    """Overwrite ``tensors`` with those of rank 0. All dtypes are allowed, because the tensors are sent as bytes."""
    for tensor in tensors:
        numbers = tensor.detach().resolve_conj().contiguous()
        dist.broadcast(as_bytes(numbers), src=0)
        tensor.detach().copy_(numbers)


def _send_what_ddp_cannot(model: nn.Module) -> None:
    """Copy from rank 0 the tensors of the dtypes in `NOT_SENT`, and make DDP ignore these tensors.

    Only buffers and frozen parameters are treated in this way. For other parameters DDP must raise, because DDP cannot
    average their gradients.
    """
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    unknown = {name for name, tensor in tensors.items() if tensor.dtype in NOT_SENT and not tensor.requires_grad}
    if unknown:
        _broadcast(tensors[name] for name in sorted(unknown))
        hidden = unknown.union(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        ignore_parameters(model, sorted(hidden))


def _raise_if_unfrozen(model: nn.Module, _: Any) -> None:
    """Raise RuntimeError if the model now has parameters to train, because their gradients would not be averaged.

    `prepare_model` does not wrap a model that has nothing to train, but adds this forward pre-hook to the model.
    """
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        raise RuntimeError(
            f"The {type(model).__name__} had nothing to train when prepare_model() was called, so its gradients would "
            "not be averaged over the ranks. Call prepare_model() again, now that some parameters require gradients."
        )


def _forget_frozen(model: nn.Module) -> None:
    """Remove the hook `_raise_if_unfrozen`, which an earlier `prepare_model` may have added.

    Otherwise a model that is unfrozen and prepared again would still raise the error of the hook.
    """
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _raise_if_unfrozen:
            del model._forward_pre_hooks[number]


def _compress(model: DistributedDataParallel, compression: Literal["fp16", "bf16", "powersgd"]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)  # the minimum that torch allows by default
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        model.register_comm_hook(None, hooks[compression])


def _check_unprepared(model: nn.Module) -> None:
    """Raise ValueError if ``model`` or a part of it is prepared already, because gradients would be averaged twice."""
    for module in model.modules():
        if isinstance(module, WRAPPERS):
            name = type(module).__name__
            raise ValueError(f"The model is prepared already, as a {name} in it shows: pass unwrap_model(model).")
    if _is_sharded(unwrap_model(model)):
        raise ValueError("The model is prepared already, and stays sharded: make a new model and load its state.")


def _is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # `fully_shard` adds this method


def _shard(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if "mesh" not in options:  # by default torch would use accelerators, even if this rank uses the CPU
        world = current_world()
        options = options | {"mesh": init_device_mesh(world.device.type, (world.world_size,))}
    for part in _repeated_blocks(model):
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated blocks of a model, such as the layers of a transformer. Each becomes an FSDP unit.

    A repeated block is in a `ModuleList` or `Sequential` together with other modules of its class, and itself contains
    modules. If repeated blocks are nested, only the outermost blocks are yielded.
    """
    children = list(module.children())
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = Counter(type(child) for child in children)
    for child in children:
        if is_container and kinds[type(child)] > 1 and any(child.children()):
            yield child
        else:
            yield from _repeated_blocks(child)
