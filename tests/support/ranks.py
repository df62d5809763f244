"""Real ranks for tests: processes under torchrun, or with hand-set ``env://`` variables, that call what a test sends.

Each rank connects to a socket of the test and answers functions with results, so that one launch serves many tests.
Run as a script, this file is such a rank.

An import of torch takes 2 s of a core, and half of the time of the suite would be such imports. So ranks with hand-set
variables are forks of one process that has imported torch and this package and has done nothing else (`RankForker`). A
test that sets further variables gets new processes, because an import may read these variables.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import numpy
import pytest

from nn_parallel._engine.pickling import _code_of_file

START_WITHIN_S = 60.0  # also on a machine that does much else
ANSWER_WITHIN_S = 25.0
END_WITHIN_S = 30.0
NOTE_CHARACTERS = 20_000  # of what the ranks have printed, under an exception that one of them has raised
AT_ONCE_S = 5.0  # what comes at once, on a busy machine; no timeout in the tests is as short


class AnyRanks(Protocol):
    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn`` on every rank; the results in rank order."""


class Ranks:
    """The ranks of one launch, in rank order."""

    def __init__(self, connections: list[Connection], pids: list[int], output: Path) -> None:
        self._connections, self.pids, self._output = connections, pids, output

    def run(
        self, fn: Callable[..., Any], *args: Any, only: list[int] | None = None, also: Sequence[int] = ()
    ) -> list[Any]:
        """Call ``fn`` on all ranks at once, or on some; the results in rank order. The first exception is raised.

        The ranks in ``also`` call it too; their answers are for `finish`.
        """
        ranks = range(len(self._connections)) if only is None else only
        for rank in (*ranks, *also):
            self._connections[rank].send_bytes(_pickled((fn, args)))
        answers = [self._answer(rank) for rank in ranks]
        for succeeded, value in answers:
            if not succeeded:
                value.add_note(f"the ranks printed:\n{self.printed()[-NOTE_CHARACTERS:]}")
                raise value
        return [value for _, value in answers]

    def finish(self, rank: int) -> Any:
        """The result of a rank that `run` did not wait for."""
        return self._answer(rank)[1]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._connections[rank].poll(ANSWER_WITHIN_S):
            pytest.fail(f"rank {rank} did not answer; the ranks printed:\n{self.stacks()}")
        try:
            answer: tuple[bool, Any] = cloudpickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            return True, "gone"
        return answer

    def stacks(self) -> str:
        """What the ranks printed, and then where each of them stands."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)  # one after another; nothing depends on it: the test has failed already
        return self.printed()

    def printed(self) -> str:
        return self._output.read_text(errors="replace")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle, from 3.1.3 on without the names of files; tests look for them in call sites."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            return _code_of_file, (*self.dispatch_table[types.CodeType](obj), obj.co_filename, None)
        return super().reducer_override(obj)


def _pickled(obj: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


@contextlib.contextmanager
def launched(world_size: int, launcher: str = "env", **environ: str) -> Iterator[Ranks]:
    """Start ranks by ``launcher``: ``"torchrun"``, or ``"env"``: one process each with the variables set by hand."""
    with tempfile.TemporaryDirectory() as folder:
        address = os.path.join(folder, "ranks")
        output = Path(folder, "output")
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        clean |= {"RANKS_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | environ
        with Listener(address, backlog=world_size) as listener, output.open("w") as file:
            rank = [sys.executable, __file__]
            commands: list[tuple[list[str], dict[str, str]]]
            if launcher == "torchrun":
                torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
                commands = [([*torchrun, "--master-port", str(free_port()), *rank[1:]], {})]
            else:
                shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                own = ("RANK", "LOCAL_RANK") if "MASTER_ADDR" in environ else ("RANK",)
                commands = [(rank, shared | environ | dict.fromkeys(own, str(number))) for number in range(world_size)]
            processes: list[_Process]
            if launcher == "env" and not environ:
                processes = [rank_forker().fork(clean | more, output) for _, more in commands]
            else:
                processes = [
                    subprocess.Popen(
                        command,
                        env=clean | more,
                        stdout=file,
                        stderr=file,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    for command, more in commands
                ]
            connections: dict[int, tuple[Connection, int]] = {}
            started: Ranks | None = None
            try:
                listener._listener._socket.settimeout(START_WITHIN_S)  # type: ignore[attr-defined]
                for _ in range(world_size):
                    connection = listener.accept()
                    number, pid = connection.recv()
                    connections[number] = connection, pid
                ordered = [connections[number] for number in range(world_size)]
                started = Ranks([connection for connection, _ in ordered], [pid for _, pid in ordered], output)
                yield started
            except TimeoutError:
                pytest.fail(f"the ranks did not come:\n{output.read_text()}")
            finally:
                listener.close()  # a rank that comes only now must not wait in the backlog
                for connection, _ in connections.values():
                    connection.close()  # each rank then ends by itself
                late = [process for process in processes if not _ends(process)]
                if late and started is not None:
                    started.stacks()
                for process in late:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                assert not late, f"ranks that did not end by themselves printed:\n{output.read_text()}"


class _Process(Protocol):
    """The part of `subprocess.Popen` that `launched` uses."""

    pid: int

    def wait(self, timeout: float | None = None) -> object: ...


class _ForkedRank:
    """A rank that a `RankForker` has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
        os.close(self._pidfd)


class RankForker:
    """A process that has imported torch and this package, and forks a rank for each request."""

    def __init__(self) -> None:
        own_end, end = socket.socketpair()
        self._connection = Connection(own_end.detach())
        with end:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--fork", str(end.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )

    def fork(self, environ: dict[str, str], output: Path) -> _ForkedRank:
        """Start a rank in this environment and in the present directory, which prints into a file."""
        self._connection.send((environ, os.getcwd(), os.fspath(output)))
        return _ForkedRank(self._connection.recv())

    def stop(self) -> None:
        self._connection.close()
        self.process.wait()


_rank_forker: RankForker | None = None


def rank_forker() -> RankForker:
    """Return the one `RankForker` of this process, which `stop_rank_forker` ends."""
    global _rank_forker
    if _rank_forker is None:
        _rank_forker = RankForker()
    return _rank_forker


def rank_forker_pid() -> int | None:
    return None if _rank_forker is None else _rank_forker.process.pid


def stop_rank_forker() -> None:
    global _rank_forker
    if _rank_forker is not None:
        _rank_forker.stop()
        _rank_forker = None


def _ends(process: _Process) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_WITHIN_S)
        return True
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _serve() -> None:
    """Be a rank: call what arrives."""
    from multiprocessing.connection import Client

    faulthandler.register(signal.SIGUSR1)
    connection = Client(os.environ["RANKS_ADDRESS"])
    connection.send((int(os.environ["RANK"]), os.getpid()))
    while True:
        try:
            fn, args = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = True, fn(*args)
        except Exception as error:
            traceback.print_exc()  # the test sees the first one only, and only once all ranks have answered
            answer = False, error
        try:
            packed = cloudpickle.dumps(answer)
        except Exception as error:
            packed = cloudpickle.dumps((False, RuntimeError(f"{answer!r}: {error!r}")))
        connection.send_bytes(packed)


def _fork_ranks(connection: Connection) -> None:
    """Be a `RankForker`. This returns in each rank, and in the forker at its end."""
    import torch._dynamo  # torch imports these only when an optimizer or FSDP needs them, in 1.4 s for each rank
    import torch.distributed.fsdp  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then removes a rank that has ended
    while True:
        try:
            environ, folder, output = connection.recv()
        except EOFError:
            os._exit(0)
        if pid := os.fork():
            connection.send(pid)
            continue
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        random.seed()  # a new process would have other random numbers than its siblings
        numpy.random.seed()
        return


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fork"]:
        _fork_ranks(Connection(int(sys.argv[2])))
        del sys.argv[1:]
    _serve()
