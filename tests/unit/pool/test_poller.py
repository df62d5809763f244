"""Who reads the answers of a pool's workers, and who waits meanwhile."""

from __future__ import annotations

import os
import threading
import time

from nn_parallel._engine.pool.poller import Poller

DEADLINE_S = 20.0


def test_answers_that_another_thread_is_about_to_read_keep_nobody_busy() -> None:
    """While it rebuilds what came before them; and afterwards whoever waits reads them."""
    poller, rebuilds, may_end, taken = Poller(), threading.Event(), threading.Event(), list[str]()
    pipes = [os.pipe() for _ in range(2)]

    def rebuild() -> bool:
        os.read(pipes[0][0], 1)
        rebuilds.set()
        assert may_end.wait(DEADLINE_S)
        return True

    def take() -> bool:
        taken.append(threading.current_thread().name)
        os.read(pipes[1][0], 1)
        return True

    poller.watch(pipes[0][0], rebuild, is_answer=True)
    poller.watch(pipes[1][0], take, is_answer=True)
    reader = threading.Thread(target=poller.read_answers)
    os.write(pipes[0][1], b"x")
    reader.start()
    assert rebuilds.wait(DEADLINE_S)
    os.write(pipes[1][1], b"x")
    begin, waits = time.monotonic(), 0
    while time.monotonic() < begin + 0.5:
        poller.wait(begin + 0.5)
        waits += 1
    assert waits < 10
    may_end.set()
    reader.join()
    while not taken:
        poller.wait(time.monotonic() + DEADLINE_S)
    assert taken == ["MainThread"]
    poller.close()
    for fd in (*pipes[0], *pipes[1]):
        os.close(fd)
