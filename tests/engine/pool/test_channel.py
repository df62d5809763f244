"""Large things travel in memory files: copied once, each receiver's own, and nothing of them is kept."""

from __future__ import annotations

import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from nn_parallel import ParallelExecutor, TransferError, current_world
from nn_parallel._engine.pickling import Pickler, dumps
from nn_parallel._engine.pool import channel as connection
from nn_parallel._engine.pool.channel import Payload
from tests.support.wire import Ends, descriptors, maps, memory_files

LARGE = 1 << 18  # elements: above what stays in a pickle


def test_only_what_views_use_is_sent(ends: Ends) -> None:
    """A few rows of a large table cost a few rows; views that overlap still share their memory."""
    table = torch.arange(1 << 22).reshape(1 << 10, 1 << 12)
    sent = [table[3], table[3:5, 1:], table[1000, ::2], table[7:7], table.t()[5, 3:6]]
    packed = dumps(sent)
    assert sum(buffer.nbytes for buffer in packed.buffers) + len(packed.pickle) < 200_000
    received = ends.send(sent)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(sent, received, strict=True))
    assert [each.stride() for each in received] == [each.stride() for each in sent]
    received[0][1] = -1
    assert received[1][0, 0] == -1
    assert received[0].data_ptr() % 64 == table[3].data_ptr() % 64


def test_a_storage_beside_its_views_is_sent_whole(ends: Ends) -> None:
    """Whoever sends a storage wants all of it, also after a view, or before; and it is still that of the views."""
    table = torch.arange(LARGE)
    for sent in ([table[:3], table.untyped_storage()], [table.untyped_storage(), table[:3]]):
        received = ends.send(sent)
        view, storage = received if isinstance(received[0], torch.Tensor) else reversed(received)
        assert torch.equal(torch.tensor([], dtype=torch.int64).set_(storage), table)
        view[0] = 5
        assert torch.tensor([], dtype=torch.int64).set_(storage)[0] == 5


def test_a_large_pickle_does_not_go_through_the_socket(ends: Ends) -> None:
    """Nobody reads here before all is sent: what is sent fits into the socket's buffer."""
    text = "x" * (10 << 20)
    assert ends.send([text, torch.ones(LARGE)])[0] == text


def test_without_memory_files_what_is_large_is_an_error() -> None:
    """Files that may not grow, as under a limit: nothing was begun, and the workers go on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ParallelExecutor(num_workers=1, devices="cpu") as ex:
        pids = ex.run(os.getpid)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            with pytest.raises(
                TransferError, match="Cannot allocate shared memory for a large object: .*File too large"
            ):
                ex.run(lambda x: (x + 1).sum().item(), torch.zeros(LARGE))
            assert ex.run(os.getpid) == pids
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_more_than_there_are_descriptors_for_is_copied(ends: Ends) -> None:
    """However much is on its way, the sender's descriptors do not run out."""
    most = connection.MAX_PAYLOAD_FILES + 20
    before = len(list(descriptors()))
    payloads = [Payload(dumps(torch.full((1 << 15,), float(k)))) for k in range(most)]
    assert len(list(descriptors())) - before == 2 * connection.MAX_PAYLOAD_FILES  # ours, and those on their way
    kept = []
    while payloads:
        ends.sender.send((7,), payloads.pop(0))
        kept.append(ends.receive()[1].load())
    assert [int(each[-1]) for each in kept] == list(range(most))


def test_a_small_view_of_a_large_tensor_needs_no_memory_file(ends: Ends) -> None:
    """A row of a table is a row, in the packet; so is what just fits, in one part or in many."""
    table = torch.arange(4096 * 64, dtype=torch.float64).view(4096, 64)
    rows = [ends.send(row) for row in table[:200]]
    assert all(map(torch.equal, rows, table[:200]))
    rows[0].zero_()
    assert rows[1].equal(table[1])
    received = ends.send([table[:50], table[1], *table[::64]])
    assert received[0].equal(table[:50])
    assert received[1].data_ptr() == received[0][1].data_ptr()
    assert torch.stack(received[2:]).equal(table[::64])
    assert memory_files() == 0


@pytest.mark.parametrize("size", range((1 << 16) - 700, (1 << 16) + 300, 50))
def test_what_just_fits_into_a_packet_and_what_does_not(ends: Ends, size: int) -> None:
    """Both arrive as they were."""
    tensor = torch.arange(size, dtype=torch.uint8)
    assert ends.send(tensor).equal(tensor)
    assert ends.send(tensor.numpy().tobytes()) == tensor.numpy().tobytes()


def test_what_was_copied_is_let_go_of(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver keeps nothing of a message that its user has dropped."""
    monkeypatch.setattr(connection, "MAX_PAYLOAD_FILES", 0)
    tensor = torch.zeros(1 << 15)
    tracemalloc.start()
    try:
        assert ends.send(tensor).equal(tensor)
        assert tracemalloc.get_traced_memory()[0] < tensor.nbytes
    finally:
        tracemalloc.stop()


def test_a_receiver_without_descriptors_says_so_and_goes_on(ends: Ends) -> None:
    """The message is lost, and told; the next ones are themselves."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends.sender.send((1,), Payload(dumps(torch.ones(LARGE))))
    ends.sender.send((2,), Payload(dumps(torch.full((LARGE,), 2.0))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        header, payload = ends.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert header == (1,)
    with pytest.raises(OSError, match="file descriptor"):
        payload.load()
    header, payload = ends.receive()
    assert header == (2,)
    assert payload.load()[0] == 2


@pytest.mark.parametrize("count", [1, 600])
def test_shared_memory_stays_shared(ends: Ends, count: int) -> None:
    """What one writes the other sees, both ways; and no descriptor is kept for it."""
    tensors = [torch.zeros(3 + (k == 0) * LARGE).share_memory_() for k in range(count)]
    before = len(list(descriptors()))
    received = ends.send({"tensors": tensors, "again": tensors[0][1:]})
    assert len(list(descriptors())) == before
    for k, (ours, theirs) in enumerate(zip(tensors, received["tensors"], strict=True)):
        theirs[0] = k
        ours[1] = -k
        assert (ours[0], theirs[1]) == (k, -k)
    received["again"][1] = 5
    assert tensors[0][2] == 5


def test_descriptors_of_a_message_that_was_not_sent_are_not_those_of_the_next(ends: Ends) -> None:
    """Those in packets before it had been sent already: they are closed."""
    unsent = [torch.zeros(4).share_memory_() for _ in range(600)]
    before = len(list(descriptors()))
    ends.sender.enqueue((6,), Payload(Pickler(share=True).pack(unsent)))
    ends.sender._outbox.pop()  # as after the error that there is no room for the last one
    ends.sender.flush()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends.sender.send((7,), Payload(Pickler(share=True).pack([torch.zeros(4).share_memory_() for _ in range(3)])))
    assert len(list(descriptors())) == before
    highest = before + 500 + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limit[1]))  # of the three only one can be opened
    try:
        _, payload = ends.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    with pytest.raises(OSError, match="file descriptor"):  # and no memory of `unsent` in the place of the other two
        payload.load()
    received = ends.send([torch.full((4,), float(k)).share_memory_() for k in range(300)])
    assert [int(each[0]) for each in received] == list(range(300))
    assert len(list(descriptors())) == before


def test_shared_memory_in_a_pool() -> None:
    """All workers write into what the caller shares; what they return of it is the caller's own."""
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        total = torch.zeros(2, dtype=torch.int64).share_memory_()

        def write(mine: torch.Tensor) -> torch.Tensor:
            mine[current_world().rank] += 1
            return mine.clone()

        assert [result[rank] for rank, result in enumerate(ex.run(write, total))] == [1, 1]
        assert total.tolist() == [1, 1]


@pytest.mark.slow
def test_results_outlive_the_pool() -> None:
    """They are the caller's: after the workers are gone, and after the pool object."""
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        results = ex.run(lambda: {"x": [torch.full((LARGE,), 3.0)]})
    del ex
    gc.collect()
    assert [result["x"][0].unique().tolist() for result in results] == [[3.0]] * 2
    results[0]["x"][0].zero_()
    assert results[1]["x"][0][0] == 3


def _load(data: torch.Tensor) -> int:
    loader = DataLoader(list(data[:8]), num_workers=2, batch_size=2)  # type: ignore[arg-type]
    return len(list(loader))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [300])
def test_many_calls_with_tensors_leave_nothing(calls: int) -> None:
    """Files and memory of parent and workers do not grow with the calls, also where workers fork, as a DataLoader does.

    Only the parent may keep a few files more: if its supervisor thread has not dropped the last task when the next call
    is packed, the file of that task is not free yet, and the call takes another one.
    """
    with ParallelExecutor(num_workers=2, devices="cpu") as ex:
        data = torch.zeros(LARGE)

        def parent() -> tuple[int, int]:
            gc.collect()
            return len(list(descriptors())), maps()

        def workers() -> list[tuple[int, int]]:
            gc.collect()
            return ex.run(lambda: (len(os.listdir("/proc/self/fd")), maps()))

        def work(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        for _ in range(20):
            ex.run(work, data)
        ex.run(_load, data)
        workers_before = workers()
        open_before, mapped_before = parent()
        for _ in range(calls):
            assert ex.run(work, data)[1][0] == 1
        for _ in range(3):
            assert ex.run(_load, data) == [4, 4]
        assert workers() == workers_before
        open_now, mapped_now = parent()
        assert open_now - open_before == mapped_now - mapped_before
        assert mapped_now - mapped_before <= calls // 30


def test_the_error_for_what_cannot_be_sent_names_it() -> None:
    """As before, of the function or of an argument, in the first call and in later ones."""
    lock = threading.Lock()
    with ParallelExecutor(num_workers=1, devices="cpu") as ex:
        for _ in range(3):
            with pytest.raises(TransferError, match="variable 'lock'"):
                ex.run(lambda: lock)
            with pytest.raises(TransferError, match="Argument 0"):
                ex.run(str, lock)


def test_no_child_inherits_what_is_received() -> None:
    """Descriptors are closed in whatever is started while they are open, in another thread."""
    here, there = socket.socketpair()
    with here, there, open(os.devnull) as file:
        connection.send_fds(here, b" ", [file.fileno()] * 3)
        _, received, is_whole = connection.receive_fds(there, bytearray(1))
    assert (len(received), is_whole) == (3, True)
    assert not any(map(os.get_inheritable, received))
    for fd in received:
        os.close(fd)


def test_what_a_worker_starts_inherits_nothing_of_it(tmp_path: Path) -> None:
    """Else a program that outlives the worker would hold its connection open."""
    with ParallelExecutor(num_workers=1, devices="cpu") as pool:
        pool.run(os.system, f"ls /proc/self/fd > {tmp_path}/inherited")
    assert (tmp_path / "inherited").read_text().split() == ["0", "1", "2", "3"]  # 3: the folder


MANY_SHARED = """
import os, resource, signal, socket
import torch
from nn_parallel import ParallelExecutor, TransferError
from nn_parallel._engine.pool import channel as connection

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
make = lambda: [torch.zeros(4).share_memory_() for _ in range(300)]
data = make()
with ParallelExecutor(num_workers=4, devices="cpu") as pool:
    assert pool.run(len, data) == [300] * 4  # in all more than one process may have open
    assert [len(result) for result in pool.run(make)] == [300] * 4
    pids = pool.run(os.getpid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    connection.ROOM_WITHIN_S = 0.5
    *received_late, unsent = [pool.submit(len, data) for _ in pids]  # it is too much in the middle of the last one
    assert isinstance(unsent.exception(), TransferError), unsent
    assert pool.submit(os.getpid).result() not in pids  # its worker has been replaced, for which there was room
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b" "], [0] * 200)
        try:
            ParallelExecutor(num_workers=1)
        except TransferError as error:
            print(error)
    print(unsent.exception())
    connection.ROOM_WITHIN_S = 50
    for pid in pids[:3]:
        os.kill(pid, signal.SIGCONT)
    assert [future.result() for future in received_late] == [300] * 3
    assert pool.run(len, data) == [300] * 4
"""


UNSENT_RESULT = """
import os, resource, socket
import torch
from nn_parallel import ParallelExecutor
from nn_parallel._engine.pool import channel as connection

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

def numbers():
    return [torch.full((4,), number).share_memory_() for number in range(300)]

def numbers_without_room():
    connection.ROOM_WITHIN_S = 0.2
    torch.on_their_way = socket.socketpair()
    for _ in range(6):  # the kernel looks how many there are already
        socket.send_fds(torch.on_their_way[0], [b" "], [0] * 200)
    return numbers()

def make_room():
    for sock in torch.on_their_way:
        sock.close()

with ParallelExecutor(num_workers=1, devices="cpu") as pool:
    pid = pool.submit(os.getpid).result()
    print(type(error := pool.submit(numbers_without_room).exception()).__name__, error)
    pool.submit(make_room).result()
    assert [int(each[0]) for each in pool.submit(numbers).result()] == list(range(300))
    assert pool.submit(os.getpid).result() == pid
"""


def _with_counted_descriptors(script: str) -> str:
    """What a script prints whose descriptors on their way the kernel counts."""
    is_root = os.geteuid() == 0  # whose are not counted unless these are dropped
    as_others = ["setpriv", "--bounding-set=-sys_resource,-sys_admin"] if is_root else []
    command = [*as_others, sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_more_descriptors_than_may_be_on_their_way() -> None:
    """The kernel counts those that have not been received: who sends more waits for that, and not for ever."""
    unopened, unsent = _with_counted_descriptors(MANY_SHARED).splitlines()
    assert unsent.startswith("len() could not be sent to Worker ")
    assert unopened.startswith("No room for the descriptors of ")


@pytest.mark.slow
def test_a_result_whose_descriptors_find_no_room_is_an_error_and_the_worker_goes_on() -> None:
    """The next result finds room, and is itself."""
    assert _with_counted_descriptors(UNSENT_RESULT).startswith("TransferError No room for the descriptors of ")
