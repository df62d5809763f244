"""The parts of torch that this package uses although they are not public.

A new version of torch may change these parts. `tests/engine/test_torch_private.py` uses each of them. If one is gone,
the test names it and says what no longer works.

Some of these parts are attributes of the user's objects, or methods that a subclass overrides. They are used where they
are needed, because a function here would only forward to them::

    Tensor._backward_hooks                      a tensor with hooks is pickled in torch's own way (pickling)
    TypedStorage._untyped_storage               a typed storage is pickled without a warning of torch (pickling)
    _metadata of a state dict                   the versions of modules are kept if a checkpoint's keys are renamed
    Module._forward_pre_hooks                   `prepare_model` removes a hook that it has added earlier
    Module._ddp_params_and_buffers_to_ignore    `prepare_model` adds to the names that the user has set
    DataLoader._get_iterator, its _workers      a prepared loader prepares the processes that load its data
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils.data import dataloader

# Flatten nested containers, map their leaves and rebuild them. Torch has no public functions for this.
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten
LoaderIterator = dataloader._BaseDataLoaderIter  # the base class of the iterators of a `DataLoader`
# Switches off the user's default device while tensors are rebuilt. The public `torch.overrides` has no such switch.
DisableTorchFunction = torch._C.DisableTorchFunction
# The module and the name of the function that torch's pickles call to rebuild a tensor whose dtype has no typed
# storage, such as float8. `pickling` looks for this name in a pickle.
REBUILD_TENSOR = "torch._utils", "_rebuild_tensor_v3"
set_tensor_metadata: Callable[[torch.Tensor, Any], None] = torch._utils.set_tensor_metadata
# Makes `DistributedDataParallel` ignore the parameters and buffers of a module that have the given names.
ignore_parameters: Callable[[torch.nn.Module, list[str]], None]
ignore_parameters = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
# The names of torch's functions that return the records of the flight recorder, for each backend.
_FLIGHT_RECORDS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
# Matches the keys under which gloo writes the address of a rank into the store.
_KEY_OF_GLOO = re.compile(r"(^|/)cpu//0/\d+$")


def groups() -> dict[dist.ProcessGroup, str]:
    """Return all process groups of this process with their names in torch, which are the same on all ranks."""
    return dict(dist.distributed_c10d._world.pg_names)


def members_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group; an empty tuple if another thread has just destroyed the group.

    The public `torch.distributed.get_process_group_ranks` raises in that case.
    """
    return tuple(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))


def all_backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of a group, such as gloo's for the CPU and NCCL's for CUDA, each once."""
    return list({id(backend): backend for backend in map(group._get_backend, group._device_types)}.values())


def reset_group_names() -> None:
    """Let torch number the names of groups from zero again.

    After a failed ``init_process_group`` the counter may differ between ranks. Ranks that use different names for the
    same group would wait for each other forever.
    """
    dist.distributed_c10d._world.group_count = 0


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the limit for the collectives of ``group``, or of the default group if ``group`` is None."""
    private = dist.distributed_c10d._set_pg_timeout  # torch has a public function for this only since version 2.14
    getattr(dist, "set_timeout", private)(timeout, group)


def default_store() -> dist.Store:
    """Return the store of the default group."""
    return dist.distributed_c10d._get_default_store()


def sequence_number(group: dist.ProcessGroup) -> int | None:
    """Return the number of operations that this rank has begun in a group; None if the group does not use gloo."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has no backend for the CPU
        return None
    if type(backend) is not dist.ProcessGroupGloo:
        return None
    number: int = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]  # missing in torch's stubs
    return number


def flight_records(entries: bool, backend: str) -> dict[str, Any]:
    """Return the records of torch's flight recorder; an empty dict if torch cannot record this ``backend``.

    If ``entries`` is true, the records include one entry for each collective.
    """
    # A build of torch for the CPU has no such function for NCCL.
    dump = getattr(torch._C._distributed_c10d, _FLIGHT_RECORDS[backend], None)
    records: dict[str, Any] = {} if dump is None else json.loads(dump(entries, False))
    return records


def gloo_addresses(store: dist.Store) -> set[tuple[str, int]]:
    """Return the addresses at which the ranks of gloo groups listen for each other. Gloo writes them into the store.

    Each value that gloo writes has these parts, one after another: the length of the host name (8 bytes), the host
    name, the size of gloo's ``transport::tcp::Address`` (8 bytes), and this address, which begins with a C
    ``sockaddr``.
    """
    keys = [key for key in store.list_keys() if _KEY_OF_GLOO.search(key)]
    addresses = set()
    for value in store.multi_get(keys) if keys else ():
        socket_address = value[16 + int.from_bytes(value[:8], sys.byteorder) :]
        family = int.from_bytes(socket_address[:2], sys.byteorder)
        port = int.from_bytes(socket_address[2:4], "big")
        host = socket_address[4:8] if family == socket.AF_INET else socket_address[8:24]
        addresses.add((socket.inet_ntop(family, host), port))
    return addresses
