"""The private parts of torch that this package uses still exist, do what they did, and are used in one file only."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import nn_parallel
from nn_parallel import ParallelExecutor, initialize_ddp
from nn_parallel._engine import torch_private
from nn_parallel._engine.ranks.context import rank_context
from nn_parallel._engine.ranks.sockets import bottom
from nn_parallel._engine.ranks.times import DEFAULT_TIMEOUT

PACKAGE = Path(nn_parallel.__file__).parent
# Attributes of the user's objects, which the docstring of `torch_private` lists.
IN_PLACE = {
    "_backward_hooks",
    "_untyped_storage",
    "_metadata",
    "_forward_pre_hooks",
    "_ddp_params_and_buffers_to_ignore",
    "_get_iterator",
    "_workers",
}


def _names_of_groups() -> bool:
    return torch_private.groups()[dist.group.WORLD] == dist.group.WORLD.group_name


def _members_of_a_group() -> bool:
    return torch_private.members_of(dist.group.WORLD) == (0, 1)


def _backends() -> bool:
    return [type(backend) for backend in torch_private.all_backends(dist.group.WORLD)] == [dist.ProcessGroupGloo]


def _sequence_numbers() -> bool:
    before = torch_private.sequence_number(dist.group.WORLD)
    dist.all_reduce(torch.ones(1))
    return before is not None and torch_private.sequence_number(dist.group.WORLD) == before + 1


def _records_of_collectives() -> bool:
    dist.all_reduce(torch.ones(1))
    records = torch_private.flight_records(True, "gloo")
    entry = records["entries"][-1]
    status = records["pg_status"][str(entry["pg_id"])]
    fields = {"collective_seq_id", "retired", "thread_id", "pg_id", "process_group"}
    return entry.keys() >= fields and status.keys() >= {"last_enqueued_collective", "last_completed_collective"}


def _timeout_of_a_group() -> bool:
    torch_private.set_timeout(timedelta(seconds=77), dist.group.WORLD)
    (backend,) = torch_private.all_backends(dist.group.WORLD)
    is_set = backend.options._timeout == timedelta(seconds=77)
    torch_private.set_timeout(DEFAULT_TIMEOUT, dist.group.WORLD)
    return bool(is_set)


def _store_of_the_default_group() -> bool:
    return isinstance(torch_private.default_store(), dist.Store)


def _addresses_of_gloo() -> bool:
    context = rank_context()
    return context is not None and len(torch_private.gloo_addresses(bottom(context.connection.store))) == 2


USES: dict[Callable[[], bool], str] = {
    _names_of_groups: "groups that users make are not closed after a failure",
    _members_of_a_group: "deadlocks in collectives are not found",
    _backends: "NCCL is not aborted after a failure",
    _sequence_numbers: "deadlocks in collectives are not found",
    _records_of_collectives: "deadlocks in collectives are not found",
    _timeout_of_a_group: "initialize_ddp(timeout=...) has no effect",
    _store_of_the_default_group: "ranks of another code's init_process_group() have no store",
    _addresses_of_gloo: "a rank is not freed from a collective of gloo",
}


def _in_a_world(use: Callable[[], bool]) -> bool:
    initialize_ddp()
    return use()


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("_"))
def test_groups(executor2: ParallelExecutor, use: Callable[[], bool]) -> None:
    assert executor2.run(_in_a_world, use) == [True, True], f"torch {torch.__version__}: {USES[use]}"


def test_names_of_groups_begin_again() -> None:
    torch_private.reset_group_names()
    # Without this, ranks wait for each other for ever after a failed init_process_group.
    assert dist.distributed_c10d._process_group_name([0], use_hashed_name=False) == "0"


def test_tensors_and_modules() -> None:
    """The private parts for tensors, modules and nested containers, used as the package uses them."""
    tensor = torch.ones(2, requires_grad=True)
    assert tensor._backward_hooks is None
    tensor.register_hook(lambda grad: grad)
    assert tensor._backward_hooks
    typed = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    assert isinstance(typed._untyped_storage, torch.UntypedStorage)

    with torch.device("meta"), torch_private.DisableTorchFunction():
        assert torch.empty(1).device.type == "cpu"
    module, name = torch_private.REBUILD_TENSOR
    assert torch.ones(1).to(torch.float8_e5m2).__reduce_ex__(2)[0] is getattr(torch._utils, name)
    assert getattr(torch._utils, name).__module__ == module
    torch_private.set_tensor_metadata(tensor, {})

    model = nn.BatchNorm1d(2)
    state = model.state_dict()
    assert isinstance(state, OrderedDict)
    assert state._metadata[""] == {"version": 2}
    handle = model.register_forward_pre_hook(lambda *_: None)
    assert list(model._forward_pre_hooks) == [handle.id]
    torch_private.ignore_parameters(model, ["running_mean"])
    assert list(model._ddp_params_and_buffers_to_ignore) == ["running_mean"]
    assert callable(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)

    leaves, structure = torch_private.tree_flatten({"a": [1, 2]})
    assert leaves == torch_private.tree_leaves({"a": [1, 2]}) == [1, 2]
    assert torch_private.tree_unflatten(leaves, structure) == {"a": [1, 2]}
    assert torch_private.tree_map(str, {"a": [1, 2]}) == {"a": ["1", "2"]}


def test_a_loader_makes_its_iterators_in_one_method() -> None:
    made = []

    class Loader(DataLoader[int]):
        def _get_iterator(self) -> object:
            iterator = super()._get_iterator()
            assert isinstance(iterator, torch_private.LoaderIterator)
            made.append(len(iterator._workers))
            return iterator

    assert len(list(Loader([1, 2], num_workers=1))) == 2
    assert made == [1]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_uses_private_parts_of_torch(path: Path) -> None:
    if path.name == "torch_private.py":
        return
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == "torch":
                named = [module, *(alias.name for alias in node.names)]
                used |= {name for name in named if any(part.startswith("_") for part in name.split("."))}
            case ast.Attribute(attr=attr) if attr.startswith("_") and not attr.startswith("__"):
                text = ast.unparse(node)
                if text.startswith(("torch.", "dist.", "DistributedDataParallel.", "group.", "backend.")):
                    used.add(text)
    assert {name for name in used if name.rpartition(".")[2] not in IN_PLACE} == set()
