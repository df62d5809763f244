"""The processes of one pool: started, heard and let go. What they work on is the supervisor's affair."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import RankTimeoutError
from ..pickling import Packed
from .evidence import OomKills
from .jobs import Job
from .poller import Poller
from .segments import Segments
from .servers import open_pool
from .transport import Parcel, send_fds
from .worker import STARTED, Setup, Task
from .workers import STACK_WITHIN_S, Output, Outputs, Worker

START_WITHIN_S = 300.0  # for a process to take tasks: longer than any machine is busy, so that no start hangs for ever


class Settings(NamedTuple):
    """What a pool was made with."""

    devices: Sequence[torch.device]
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    timeout_s: float | None  # of the initializer
    idle_limit_s: float | None
    prefix_output: bool


class End(NamedTuple):
    """The end of a worker process."""

    worker: Worker
    exitcode: int
    evidence: str


class Crew:
    """The worker processes of one pool and the connection to the fork server that starts and reaps them."""

    def __init__(self, settings: Settings, segments: Segments, on_news: Callable[[], bool]) -> None:
        """``on_news`` is called when there is something for `hear`."""
        self.living: list[Worker] = []
        self.timed = set[Worker]()  # those that have, or had, a deadline
        self.outputs = Outputs()
        self._segments, self._prefix_output = segments, settings.prefix_output
        self._directory = os.getcwd()
        self._unnamed: deque[Worker] = deque()  # forked in this order, whose process ids have not been told yet
        self._oom_kills = OomKills()
        self._server = open_pool()
        self.poller = Poller()
        self.poller.watch(self._server.fileno(), on_news)
        self.poller.watch(self.outputs.fileno(), self.outputs.copy)

    def start(self, index: int, device: torch.device, read: Callable[[Worker], bool]) -> Worker:
        """Have a worker forked and send it its set-up; it need not be there yet. ``read`` takes what it answers."""
        setup = Setup(
            rank=index,
            device=str(device),
            environ=dict(os.environ),
            directory=self._directory,
            path=list(sys.path),
            argv=list(sys.argv),
            main_file=getattr(sys.modules.get("__main__"), "__file__", None),
            authkey=bytes(multiprocessing.current_process().authkey),
        )
        worker = self._fork(setup)
        self._unnamed.append(worker)
        self.living.append(worker)
        self.poller.watch(worker.link.sock.fileno(), functools.partial(read, worker), is_answer=True)
        self.poller.watch(worker.control.fileno(), worker.receive_stack)
        for output in worker.output:
            self.outputs.add(output)
        packed = Packed(pickle.dumps(tuple(setup)), is_plain=True)
        with contextlib.suppress(OSError):
            worker.link.send(Task(STARTED, is_call=False), Parcel(packed, self._segments))
        return worker

    def hear(self) -> list[End]:
        """What the fork server tells: the ends of workers.

        Raises:
            EOFError: it has ended itself.
        """
        try:
            text = self._server.recv(4096)
        except ConnectionError:
            text = b""
        if not text:
            raise EOFError
        told: dict[str, int] = json.loads(text)
        if "errno" in told:
            evidence = f"It could not be forked: {os.strerror(told['errno'])}."
            return [End(self._unnamed.popleft(), os.EX_OSERR, evidence)]
        if pid := told.get("pid"):
            self._unnamed.popleft().named(pid, START_WITHIN_S)
            return []
        evidence = f"Its memory use peaked at {told['max_rss_kib'] // 1024} MiB."
        if kills := self._oom_kills.since_last_asked():
            evidence += f" The kernel's out-of-memory killer counted {kills} kill{'s' * (kills > 1)} in this cgroup."
        return [End(worker, told["exitcode"], evidence) for worker in self.living if worker.pid == told["exited"]]

    def forget(self, number: int) -> None:
        """The handle of that number is gone."""
        for worker in self.living:
            worker.forget(number)

    def next_deadline(self) -> float | None:
        """When there is something for `keep_deadlines`."""
        deadlines = (at for worker in self.timed for at in (worker.deadline, worker.stack_by, worker.kill_at))
        return min((at for at in deadlines if at is not None), default=None)

    def keep_deadlines(self) -> dict[Job | None, list[Worker]]:
        """Do what is due; by job, the workers that have had time to tell where they stand, and have run out of it."""
        now, silent, waited_for = time.monotonic(), dict[Job | None, list[Worker]](), set()
        for worker in list(self.timed):
            if worker.kill_at is not None and now > worker.kill_at:
                worker.kill()
            elif worker.stack_by is not None:
                job = worker.job if worker.has_started else None
                silent.setdefault(job, []).append(worker)
                if now < worker.stack_by and not worker.has_told:
                    waited_for.add(job)
            elif worker.deadline is not None and now > worker.deadline:
                if worker.link.has_more():  # its answer, to which whoever reads has not come
                    worker.deadline = now + STACK_WITHIN_S
                else:
                    worker.ask_for_stack()
            elif worker.deadline is worker.stack_by is worker.kill_at is None:
                self.timed.remove(worker)
        return {job: late for job, late in silent.items() if job not in waited_for}

    def silence(self, silent: list[Worker], job: Job | None) -> RankTimeoutError:
        """The error of a job, or of the start, during which these workers ran out of time."""
        what, limit = "The start of workers", f"{START_WITHIN_S:g} s"
        if job is not None:
            what, limit = job.call.name, f"timeout={job.call.options.timeout_s:g} s"
        silent = sorted(silent, key=lambda worker: worker.index)
        stacks = {worker.index: worker.where_it_stands() for worker in silent}
        told = "\n".join(f"{worker.description}:\n{stacks[worker.index]}" for worker in silent)
        return RankTimeoutError(
            f"{what} did not end within {limit}. Where its workers stand:\n{told}",
            ranks=list(stacks),
            stacks=stacks,
        )

    def orphans(self) -> list[End]:
        """The ends of all workers, after that of the fork server. What they had started may live on: it is killed."""
        for worker in self.living:
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
        return [End(worker, -signal.SIGKILL, "The fork server has ended.") for worker in self.living]

    def dismiss(self, worker: Worker) -> None:
        """Copy the last words of an ended worker and let go of it."""
        for output in worker.output:
            output.copy(flush=True)
            self.outputs.remove(output)
        for fd in worker.fds:
            self.poller.unwatch(fd)
        worker.close()
        self.living.remove(worker)
        self.timed.discard(worker)

    def close(self) -> None:
        """Let go of everything; the fork server ends the workers that are left."""
        with self.poller.reclaimed():
            for worker in list(self.living):
                self.dismiss(worker)
        self.poller.close()
        self.outputs.close()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it too: closing is not enough
        self._server.close()

    def _fork(self, setup: Setup) -> Worker:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as given_away:
            sockets, output, theirs = [], [], []
            for _ in ("connection", "descriptors", "control"):
                here, there = socket.socketpair()
                sockets.append(on_failure.enter_context(here))
                theirs.append(given_away.enter_context(there).fileno())
            tokens = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
            on_failure.callback(os.close, tokens)
            theirs.append(tokens)
            for name in ("stdout", "stderr"):
                read, write = os.pipe()
                given_away.callback(os.close, write)
                on_failure.callback(os.close, read)
                prefix = f"[rank {setup.rank}] " if self._prefix_output else ""
                output.append(Output(read, name, prefix, self.outputs.held_up))
                theirs.append(write)
            worker = Worker(setup.rank, setup.device, self._server, sockets, output, tokens, self.timed)
            with contextlib.suppress(ConnectionError):  # the fork server has ended: we hear of it
                send_fds(self._server, b"fork", theirs)
            on_failure.pop_all()
        return worker
