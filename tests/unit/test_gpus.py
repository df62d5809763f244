"""Which GPUs there are and which are taken; with made-up ones behind NVML's functions, and real locks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nn_parallel import GPU, LaunchError, gpus, list_gpus, parse_gpu_selection, select_gpus
from tests.support import fake_nvml


@pytest.fixture(autouse=True)
def _own_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Locks of the test's own; and none is held when it is over."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpus, "_held", {})
    yield
    for lock in gpus._held.values():
        os.close(lock)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> fake_nvml.Nvml:
    """Four GPUs, the third with the most free memory, the last two equal but for what runs on them."""
    free = [(0, 10_000, 0), (1, 20_000, 0), (2, 80_000, 90), (3, 80_000, 5)]
    return fake_nvml.install(monkeypatch, *(fake_nvml.gpu(*each) for each in free))


def _numbers(chosen: list[GPU]) -> list[int]:
    return [gpu.index for gpu in chosen]


def test_what_a_gpu_tells(nvml: fake_nvml.Nvml) -> None:
    """Each field, in MiB, percent and degrees; and NVML is let go of."""
    first, *others = list_gpus()
    assert first == GPU(0, "GPU-00ab-0", "NVIDIA Test", 80_000, 10_000, 0, 40, (100,), is_visible=True)
    assert _numbers(others) == [1, 2, 3]
    assert nvml.users == 0


def test_a_gpu_may_refuse_anything_but_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in WSL, in a container, or one in MIG mode: what is refused is None."""
    fake_nvml.install(monkeypatch, {"uuid": "GPU-1"}, {"uuid": "GPU-2", "processes": []})
    assert list_gpus() == [GPU(0, "GPU-1"), GPU(1, "GPU-2", processes=())]


@pytest.mark.parametrize("asked", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_gpu_that_has_failed_is_left_out(
    asked: str, nvml: fake_nvml.Nvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NVML counts it, and refuses to say more; the others keep their numbers."""
    answer, lost = getattr(nvml, asked), (2, nvml.gpus[2])

    def refuse(which: Any) -> Any:
        if which in lost:
            raise fake_nvml.NVMLError("GPU is lost")
        return answer(which)

    monkeypatch.setattr(nvml, asked, refuse)
    assert _numbers(list_gpus()) == [0, 1, 3]
    assert caplog.messages == ["GPU 2 cannot be used: GPU is lost."]
    with pytest.raises(ValueError, match="'2' names no GPU"):
        parse_gpu_selection("2")


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An empty list and one line, and errors that say so."""
    broken = fake_nvml.install(monkeypatch)

    def refuse() -> None:
        raise fake_nvml.NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(broken, "nvmlInit", refuse)
    with caplog.at_level(logging.INFO, "nn_parallel"):
        assert list_gpus() == []
    assert caplog.messages == ["No NVIDIA GPU can be seen: NVML Shared Library Not Found."]
    with pytest.raises(ValueError, match="'0' names no GPU: there is no GPU that NVML can see"):
        parse_gpu_selection("0")
    with pytest.raises(ValueError, match="'all' selects no GPU: there is no GPU that NVML can see"):
        parse_gpu_selection("all")
    with pytest.raises(LaunchError, match="1 GPUs were asked for, and 0 can be had: NVML sees none"):
        select_gpus(1)


@pytest.mark.parametrize(
    ("shown", "visible"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,0", []),
        ("3,x,1", [3]),
        ("1, 2", [1, 2]),
        ("0,9,1", [0]),
        ("GPU-33ab-3,GPU-11", [1, 3]),
        ("GPU-33, GPU-11", [3]),
        ("GPU-", []),
        ("MIG-1234,0", []),
    ],
)
def test_what_cuda_visible_devices_shows(
    shown: str | None, visible: list[int], nvml: fake_nvml.Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA and torch read it: an entry that is none hides itself and all after it, a repeated one everything."""
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [gpu.index for gpu in list_gpus() if gpu.is_visible] == visible


def test_a_slice_stands_for_its_gpu(nvml: fake_nvml.Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one in MIG mode a program sees one slice, by its own name and memory; the other GPUs are hidden."""
    part = {"uuid": "MIG-7b-1", "name": "NVIDIA Test MIG 3g.40gb", "memory": (40_000, 30_000)}
    nvml.gpus[2]["slices"] = [{"uuid": "MIG-7b-0"}, part]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7b-1")
    [gpu] = [gpu for gpu in list_gpus() if gpu.is_visible]
    assert (gpu.index, gpu.uuid, gpu.memory_total_mb, gpu.memory_free_mb) == (2, "MIG-7b-1", 40_000, 30_000)
    assert [chosen.uuid for chosen in select_gpus(1)] == ["MIG-7b-1"]
    assert [chosen.uuid for chosen in parse_gpu_selection("MIG-7b-1")] == ["MIG-7b-1"]


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [("0", [0]), ("3, 1", [3, 1]), ("0,2-3", [0, 2, 3]), ("all", [0, 1, 2, 3]), ("GPU-22,GPU-00ab-0", [2, 0])],
)
def test_selections(selection: str, chosen: list[int], nvml: fake_nvml.Nvml) -> None:
    """Numbers, ranges with both ends, all, and abbreviated UUIDs; in the order of the selection."""
    assert _numbers(parse_gpu_selection(selection)) == chosen


def test_all_are_those_that_are_shown(nvml: fake_nvml.Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was given two of four GPUs stays on these; where none is left, the error says why."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert _numbers(parse_gpu_selection("all")) == [1, 2]
    assert _numbers(select_gpus(2)) == [2, 1]
    with pytest.raises(ValueError, match="GPU 3 is hidden from this process by CUDA_VISIBLE_DEVICES=1,2"):
        parse_gpu_selection("1,3")
    with pytest.raises(LaunchError, match=r"3 GPUs .* 2 can be had: .*GPU 3 is hidden by CUDA_VISIBLE_DEVICES=1,2"):
        select_gpus(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"'all' selects no GPU: .* hidden by CUDA_VISIBLE_DEVICES=\."):
        parse_gpu_selection("all")


@pytest.mark.parametrize("selection", ["", "4", "0-4", "2-1", "3-", "x", "-1", "0,", "GPU-9", "MIG-1"])
def test_a_selection_of_what_is_not_there(selection: str, nvml: fake_nvml.Nvml) -> None:
    """The message says what there is."""
    with pytest.raises(ValueError, match="names no GPU: there are the GPUs 0 to 3"):
        parse_gpu_selection(selection)


def test_selections_that_are_not_clear(nvml: fake_nvml.Nvml) -> None:
    """The same one twice, and an abbreviation of several."""
    with pytest.raises(ValueError, match="'0-1,1' names GPU 1 twice"):
        parse_gpu_selection("0-1,1")
    with pytest.raises(ValueError, match="'GPU-' is short for several: GPU-00ab-0, GPU-11ab-1"):
        parse_gpu_selection("GPU-")


def test_the_freest_are_taken(nvml: fake_nvml.Nvml) -> None:
    """By free memory, and of equal ones the least busy; the same again for the same process."""
    assert _numbers(select_gpus(1)) == [3]
    assert _numbers(select_gpus(3)) == [3, 2, 1]
    assert _numbers(select_gpus(1, min_memory_mb=80_000)) == [3]


def test_too_few_with_so_much_memory(nvml: fake_nvml.Nvml) -> None:
    """The error says what is the matter with each of the others, and none is kept."""
    with pytest.raises(LaunchError, match=r"3 GPUs .* 2 can be had: GPU 1 has 20000 MiB free, fewer than 30000; GPU 0"):
        select_gpus(3, min_memory_mb=30_000)
    assert gpus._held == {}
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        select_gpus(0)


def test_a_gpu_that_hides_its_memory_is_taken_only_if_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no telling whether it has enough."""
    fake_nvml.install(monkeypatch, {"uuid": "GPU-1"})
    with pytest.raises(LaunchError, match="GPU 0 does not report how much memory is free"):
        select_gpus(1, min_memory_mb=1)
    assert _numbers(select_gpus(1)) == [0]


OTHER_JOB = """
import sys, tempfile
sys.path[:0] = {path!r}
import pytest
from tests.support import fake_nvml
from nn_parallel import select_gpus
tempfile.tempdir = {tempdir!r}
with pytest.MonkeyPatch.context() as patch:
    fake_nvml.install(patch, *(fake_nvml.gpu(number, 1000 * number) for number in range(4)))
    print(*(gpu.index for gpu in select_gpus(2)), flush=True)
    input()
"""


def test_two_jobs_do_not_take_the_same(nvml: fake_nvml.Nvml, tmp_path: Path) -> None:
    """What another process has selected is its own until it ends, however it ends."""
    code = OTHER_JOB.format(path=sys.path, tempdir=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "3 2\n"
        assert _numbers(select_gpus(1)) == [1]
        with pytest.raises(
            LaunchError, match="3 GPUs .* 2 can be had: GPU 3 is taken by another process; GPU 2 is taken"
        ):
            select_gpus(3)
        job.kill()
    assert _numbers(select_gpus(3)) == [1, 3, 2]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_two_users_do_not_take_the_same(nvml: fake_nvml.Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask of the first one is; a lock that cannot be read is named."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        os.chmod(shared, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", shared)
        before = os.umask(0o077)
        try:
            assert _numbers(select_gpus(1)) == [3]
        finally:
            os.umask(before)
        assert os.listdir(shared) == ["nn_parallel-GPU-33ab-3.lock"]
        assert _as_another_user(1) == "[2]"
        os.chmod(Path(shared, "nn_parallel-GPU-33ab-3.lock"), 0o600)
        assert "GPU-33ab-3.lock, the lock of a GPU, cannot be read: its owner can" in _as_another_user(1)


def _as_another_user(count: int) -> str:
    """What comes of `select_gpus` there."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setuid(65_534)
            gpus._held = {}
            told = str(_numbers(select_gpus(count)))
        except Exception as error:
            told = str(error)
        finally:
            os.write(write, told.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return told


def test_the_lock_is_followed_by_another_look(nvml: fake_nvml.Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had the lock before may have left something running there."""
    lock = gpus._lock

    def fill_meanwhile(uuid: str) -> int | None:
        if uuid == "GPU-33ab-3":
            nvml.gpus[3]["memory"] = (80_000, 500)
        return lock(uuid)

    monkeypatch.setattr(gpus, "_lock", fill_meanwhile)
    assert _numbers(select_gpus(1, min_memory_mb=1_000)) == [2]
    assert list(gpus._held) == ["GPU-22ab-2"]
