"""The processes that a process has started, as Linux tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from nn_parallel._engine.descendants import children_of, descendants_of, is_stopped
from tests.support.processes import wait_for_state


def test_children_and_their_children_are_found() -> None:
    """A shell that waits for a sleep: the one is a child, both are descendants; when they have ended, nobody is."""
    code = "import subprocess; subprocess.run(['sh', '-c', 'echo $$; read line; exit'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert child.pid in children_of(os.getpid())
        assert children_of(child.pid) == [grandchild]
        assert descendants_of(child.pid) == [grandchild]
        assert {child.pid, grandchild} <= set(descendants_of(os.getpid()))
    assert descendants_of(child.pid) == []


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    """SIGSTOP stops it, SIGCONT lets it go on; one that has ended is not stopped."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        wait_for_state(child.pid, "T")
        assert is_stopped(child.pid)
        os.kill(child.pid, signal.SIGCONT)
    assert not is_stopped(child.pid)
