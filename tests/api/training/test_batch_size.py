"""`find_batch_size`: all ranks agree, whichever one runs out of memory, and nothing of the failed tries stays."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nn_parallel import ParallelExecutor, RankError, current_world, find_batch_size, initialize_ddp, prepare_model
from tests.support.ranks import AnyRanks

ROOM_BYTES = 1 << 30  # for what a rank allocates
SAMPLE_BYTES = 20 << 20


def test_all_ranks_try_the_same_sizes_whichever_is_out_of_memory(any_ranks: AnyRanks) -> None:
    """The last rank has least room; the others sit in a collective meanwhile, and the group works afterwards."""

    def scenario() -> Any:
        place, tried = initialize_ddp(), list[int]()

        def step(size: int) -> None:
            tried.append(size)
            if place.rank == place.world_size - 1 and size > 12:
                raise torch.OutOfMemoryError(f"CUDA out of memory with {size}")
            dist.all_reduce(torch.ones(1))

        found = find_batch_size(step, 100)
        total = torch.ones(1)
        dist.all_reduce(total)
        return found, tried, int(total)

    results = any_ranks.run(scenario)
    assert results == [(12, [100, 50, 25, 12], len(results))] * len(results)


@pytest.mark.parametrize(
    "told",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "GET was unable to find an engine to execute this computation",
        "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_libraries_have_words_of_their_own_for_it(told: str) -> None:
    """They raise plain RuntimeErrors."""

    def step(size: int) -> None:
        if size > 2:
            raise RuntimeError(told)

    assert find_batch_size(step, 8) == 2


@pytest.fixture(scope="module")
def small_executor2() -> Iterator[ParallelExecutor]:
    """Rank 1 may allocate no more than `ROOM_BYTES`."""

    def limit() -> None:
        torch.ones(2, 2).mm(torch.ones(2, 2))  # threads and caches that it will need anyway
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if current_world().rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))

    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        ex.run(limit)
        yield ex


def step(size: int) -> None:
    """Forward and backward of a DDP model, whose activations take `SAMPLE_BYTES` for each sample."""
    model = prepare_model(nn.Linear(1, SAMPLE_BYTES // 4, bias=False))
    model(torch.ones(size, 1)).square().mean().backward()


@pytest.mark.slow
def test_memory_of_a_failed_try_is_given_back(small_executor2: ParallelExecutor) -> None:
    """Torch's allocator refuses on one rank; both find what fits, and keep no tensor of what did not."""

    def scenario() -> tuple[int, int]:
        found = find_batch_size(step, 64)
        kept = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.nbytes >= SAMPLE_BYTES]
        return found, len(kept)

    first, second = small_executor2.run(scenario)
    assert first == second
    assert 2 <= first[0] <= 32
    assert first[1] == 0


def test_a_model_that_never_fits(small_executor2: ParallelExecutor) -> None:
    """Every rank is told the smallest size, whose try was too much, and what could not be allocated."""

    def never(size: int) -> None:
        if current_world().rank == 1:
            torch.ones(size, 2 * ROOM_BYTES // 4)
        dist.barrier()

    def scenario() -> str:
        with pytest.raises(MemoryError) as raised:
            find_batch_size(never, 4)
        return str(raised.value)

    for told in small_executor2.run(scenario):
        assert "never() does not fit into memory with one sample: on rank 1 of 2, RuntimeError: " in told
        assert f"you tried to allocate {2 * ROOM_BYTES} bytes" in told


def test_any_other_error_is_raised(any_ranks: AnyRanks) -> None:
    """At the first size, on every rank."""

    def scenario() -> tuple[str, int]:
        tried = list[int]()

        def fails(size: int) -> None:
            tried.append(size)
            if initialize_ddp().rank == 1:
                raise ValueError("of another kind")
            dist.barrier()

        with pytest.raises(RankError, match="ValueError: of another kind") as raised:
            find_batch_size(fails, 8)
        return str(list(raised.value.failures)), len(tried)

    assert set(any_ranks.run(scenario)) == {("[1]", 1)}


def test_alone() -> None:
    """As with one rank: a plain loop, and plain errors."""
    with pytest.raises(ValueError, match="start=0 must be a whole number of at least 1"):
        find_batch_size(print, 0)

    def needs(size: int) -> None:
        if size > 3:
            raise MemoryError
        assert size != 1

    assert find_batch_size(needs, 27) == 3
    with pytest.raises(AssertionError):
        find_batch_size(needs, 1)


def test_alone_a_model_that_never_fits() -> None:
    """As on several ranks."""

    def never(size: int) -> None:
        raise MemoryError(f"no room for {size}")

    with pytest.raises(MemoryError, match=r"never\(\) does not fit into memory with one sample: .*no room for 1"):
        find_batch_size(never, 9)
