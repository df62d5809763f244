"""Several nodes on one machine, each with a name, addresses and process ids of its own, and cables to a common switch.

A node is a process in namespaces of its own, which this module starts and ends; with it ends all that runs there. Its
cable ends in this process, which hands the frames on: late, or some of them, or none.

``python tests/support/laboratory.py [NODES]`` makes one, for a person to try, and shows how to run a command on a node.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"
MTU = 9000
TUNSETIFF, TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
FOREVER_S = 3600.0


class Node:
    """One of them."""

    def __init__(self, index: int, card: int, pid: int) -> None:
        """``card``: the descriptor with the frames of its interface; ``pid``: of the process that it lives in."""
        self.name, self.address, self.address6 = name_of(index), f"10.213.7.{index + 1}", f"fd00:213::{index + 1}"
        self.card, self.pid = card, pid
        self.delay_s, self.loss, self.is_cut, self.is_off = 0.0, 0.0, False, False

    def command(self, command: list[str]) -> list[str]:
        """``command`` as it is run here."""
        spaces = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", "--target", str(self.pid), *spaces, "--", *command]

    def cut(self) -> None:
        """Pull the cable out."""
        self.is_cut = True

    def mend(self) -> None:
        """Plug it in again."""
        self.is_cut = False

    def power_off(self) -> None:
        """All that runs here is gone at once, and no other node hears of it."""
        self.cut()
        self.is_off = True
        os.kill(self.pid, signal.SIGKILL)

    def processes(self) -> list[str]:
        """The command lines of all that runs here, but for the node itself."""
        listed = subprocess.run(
            self.command(["ps", "-e", "-o", "pid=,args="]), capture_output=True, text=True, timeout=30
        ).stdout
        return [line for line in listed.splitlines() if line.split()[0] != "1" and "ps -e" not in line]


class Switch:
    """What all cables end in: a thread that hands each frame to all other nodes."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = {node.card: node for node in nodes}
        self._under_way: list[tuple[float, int, int, bytes]] = []  # when it is due, a number, the receiver, the frame
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._wake)
        self._thread.join()
        os.close(self._woken)

    def _loop(self) -> None:
        poll, count = select.poll(), 0
        for fd in (*self._nodes, self._woken):
            poll.register(fd, select.POLLIN)
        while True:
            due_in_s = self._under_way[0][0] - time.monotonic() if self._under_way else FOREVER_S
            for fd, _ in poll.poll(max(0.0, due_in_s) * 1000):
                if fd == self._woken:
                    return
                sender, frame = self._nodes[fd], os.read(fd, MTU + 64)
                if sender.is_cut or random.random() < sender.loss:
                    continue
                for receiver in self._nodes:
                    if receiver != fd:
                        count += 1
                        heapq.heappush(self._under_way, (time.monotonic() + sender.delay_s, count, receiver, frame))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, receiver, frame = heapq.heappop(self._under_way)
                if not self._nodes[receiver].is_cut:
                    with contextlib.suppress(OSError):  # it is switched off
                        os.write(receiver, frame)


def name_of(index: int) -> str:
    return f"node{index + 1}"


def is_possible() -> bool:
    """Whether we may make namespaces and their interfaces."""
    programs = ("ip", "nsenter", "ps", "setpriv", "unshare")
    if os.geteuid() != 0 or not all(map(shutil.which, programs)) or not os.path.exists("/dev/net/tun"):
        return False
    return subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@contextlib.contextmanager
def laboratory(
    folder: Path, count: int = 2, *, ipv4: bool = True, own_name_is_loopback: bool = False
) -> Iterator[list[Node]]:
    """Make ``count`` nodes, which know each other by name; without ``ipv4`` they have IPv6 alone, also as loopback.

    They share all files of this machine but ``/etc/hosts``, which for each is one in ``folder``. With
    ``own_name_is_loopback`` each knows itself as 127.0.1.1, as Debian's installer arranges it.
    """
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(_node(index, folder / f"hosts.{name_of(index)}")) for index in range(count)]
        for node in nodes:
            lines = ["::1 localhost"] + ["127.0.0.1 localhost"] * ipv4
            for each in nodes:
                is_own = each is node and own_name_is_loopback
                address = "127.0.1.1" if is_own else each.address if ipv4 else each.address6
                lines.append(f"{address} {each.name}")
            (folder / f"hosts.{node.name}").write_text("\n".join([*lines, ""]))
            _ip(node, "link", "set", "lo", "up")
            if not ipv4:
                _ip(node, "address", "delete", "127.0.0.1/8", "dev", "lo")
            _ip(node, "link", "set", INTERFACE, "mtu", str(MTU), "up")
            _ip(node, "address", "add", f"{node.address6}/64", "dev", INTERFACE, "nodad")
            if ipv4:
                _ip(node, "address", "add", f"{node.address}/24", "dev", INTERFACE)
        stack.callback(Switch(nodes).close)
        yield nodes


@contextlib.contextmanager
def _node(index: int, hosts: Path) -> Iterator[Node]:
    ours, theirs = socket.socketpair()
    hosts.touch()
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    me = [sys.executable, __file__, "be", name_of(index), str(hosts), str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(["setpriv", "--pdeathsig=KILL", "unshare", *spaces, *me], pass_fds=[theirs.fileno()])
        try:
            theirs.close()
            ours.settimeout(30)
            _, (card, *_), _, _ = socket.recv_fds(ours, 1, 1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            try:
                yield Node(index, card, int(children))
            finally:
                os.close(card)
        finally:
            process.kill()
            process.wait()


def _be_node(name: str, hosts: str, fd: str) -> None:
    """In the namespaces of a node, as its first process: until it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else waits for orphans
    socket.sethostname(name)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    card = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), TAP_WITHOUT_HEADER))
    with socket.socket(fileno=int(fd)) as laboratory:
        socket.send_fds(laboratory, [b"."], [card])
    os.close(card)
    while True:
        signal.pause()


def _ip(node: Node, *arguments: str) -> None:
    subprocess.run(node.command(["ip", *arguments]), check=True, capture_output=True, text=True, timeout=30)


def _show(count: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, laboratory(Path(folder), count) as nodes:
        for node in nodes:
            print(f"{node.name} is {node.address} and {node.address6}:", *node.command(["COMMAND"]))
        input("Return ends it. ")


if __name__ == "__main__":
    if sys.argv[1:2] == ["be"]:
        _be_node(*sys.argv[2:])
    else:
        _show(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
