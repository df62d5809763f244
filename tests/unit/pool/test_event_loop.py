"""The event loop of a pool's thread."""

from __future__ import annotations

import os
import threading
import time

import pytest

from nn_parallel._engine.pool.event_loop import EventLoop

DEADLINE_S = 20.0


def test_what_other_threads_post_is_called_in_its_order() -> None:
    """And wakes the loop."""
    loop = EventLoop()
    called: list[int] = []
    threads = [threading.Thread(target=lambda: [loop.post(called.append, n) for n in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    while len(called) < 400:
        loop.run_once(begun + DEADLINE_S)
    assert time.monotonic() - begun < DEADLINE_S / 2
    assert sorted(called) == sorted(list(range(100)) * 4)
    loop.close()


def test_a_descriptor_is_read_until_it_is_forgotten() -> None:
    """Also if what is read before it in one turn forgets it."""
    loop = EventLoop()
    read: list[int] = []
    pipes = [os.pipe() for _ in range(2)]

    def forget_both(fd: int) -> None:
        read.append(fd)
        for other, _ in pipes:
            loop.unwatch(other)

    for fd, write in pipes:
        loop.watch(fd, lambda fd=fd: forget_both(fd))  # type: ignore[misc]
        os.write(write, b"x")
    for _ in range(2):
        loop.run_once(time.monotonic())
    assert len(read) == 1
    loop.close()
    for fd in (*pipes[0], *pipes[1]):
        os.close(fd)


def test_timers_are_called_in_their_order() -> None:
    """And not before their time."""
    loop = EventLoop()
    called: list[str] = []
    begun = time.monotonic()
    loop.call_later(0.05, lambda: called.append("second"))
    loop.call_later(0.02, lambda: called.append("first"))
    while len(called) < 2:
        loop.run_once(begun + DEADLINE_S)
    assert called == ["first", "second"]
    assert time.monotonic() - begun >= 0.05
    loop.close()


def test_what_is_posted_after_the_end_is_not_called_and_no_error() -> None:
    """It writes to no descriptor that has got the number of the loop's."""
    loop = EventLoop()
    loop.close()
    called: list[int] = []
    loop.post(called.append, 1)
    assert called == []
    loop.run_posted()
    assert called == [1]


def test_a_loop_that_ends_while_a_thread_posts_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread writes to the loop's own descriptor, and not to a file that has got the number of the loop's."""
    loop = EventLoop()
    write = os.eventfd_write
    others: list[int] = []

    def write_late(fd: int, value: int) -> None:
        loop.close()
        others.extend(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(20))  # these take the lowest free numbers
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    loop.post(int)
    assert others
    for other in others:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)


def test_the_traceback_of_ctrl_c_keeps_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come in the middle of `post`, and a user may keep the exception after the end of the pool."""
    write = os.eventfd_write

    def write_and_interrupt(fd: int, value: int) -> None:
        write(fd, value)
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    loop = EventLoop()
    monkeypatch.setattr(os, "eventfd_write", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        loop.post(int)
    loop.close()
    assert os.listdir("/proc/self/fd") == before
    assert caught.value.__traceback__ is not None  # it still holds the frame of `post`
