"""Memory files: filled by the sender, mapped by each receiver, filled again only when nobody sees them."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from nn_parallel._engine.pool import memory_files as files
from tests.support.wire import Ends, maps, memory_files

LARGE = 1 << 18  # elements: above what stays in a pickle


def test_each_has_its_own(ends: Ends) -> None:
    """Writes of the receiver and of the sender are nobody else's."""
    sent = torch.zeros(LARGE)
    one, two = ends.send(sent), ends.send(sent)
    one += 1
    sent += 2
    assert (one.sum(), two.sum(), sent.sum()) == (LARGE, 0, 2 * LARGE)


def test_a_file_is_filled_again_only_when_nobody_sees_it(ends: Ends) -> None:
    """What the receiver keeps stays what it was, through any number of later messages; what it drops is used again."""
    kept = ends.send(torch.full((LARGE,), 7.0))
    for number in range(20):
        assert ends.send(torch.full((LARGE,), float(number))).unique().tolist() == [number]
    assert kept.unique().tolist() == [7]
    assert memory_files() == 2
    assert maps() == 3  # two of the sender, one of the receiver
    del kept
    assert maps() == 2


@pytest.mark.slow
def test_what_a_child_may_see_is_not_filled_again(ends: Ends) -> None:
    """A process forked while a tensor lives has it for as long as it likes."""
    kept = ends.send(torch.full((LARGE,), 7.0))
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        there.recv(1)  # the word to look, or the end of this test
        there.send(b"7" if kept[0].item() == kept[-1].item() == 7 else b"?")  # no threads of torch in a child
        os._exit(0)
    there.close()
    with here:
        del kept
        for _ in range(3):
            ends.send(torch.zeros(LARGE))
        here.send(b"x")
        assert here.recv(1) == b"7"
    os.waitpid(child, 0)
    assert files._reusable_files


def test_a_child_fills_its_own(ends: Ends) -> None:
    """It has the files of its parent, too, and each may fill only its own."""
    received = ends.send(torch.full((LARGE,), 7.0))
    del received
    child = os.fork()
    if child == 0:
        os._exit(len(files._reusable_files))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(files._reusable_files) == 1


def test_kept_files_are_few(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be filled again is bounded in bytes."""
    monkeypatch.setattr(files, "KEPT_BYTES", 10 << 20)
    many = [ends.send(torch.zeros(1 << 20)) for _ in range(5)]
    assert memory_files() == 2
    assert all(not each.any() for each in many)


def test_a_view_of_what_was_received_keeps_all_of_it(ends: Ends) -> None:
    """One element that lives on is enough."""
    element = ends.send([torch.full((LARGE,), 7.0), torch.zeros(LARGE)])[0][5]
    for _ in range(3):
        ends.send(torch.ones(2 * LARGE))
    assert element == 7
