"""Two nodes on one machine: network namespaces of the test's own, joined by a cable that it can cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACE = "eth0"


class Nodes:
    """The two of them."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names

    def command(self, node: int, command: list[str]) -> list[str]:
        """``command`` as it is run on a node."""
        return ["ip", "netns", "exec", self._names[node], *command]

    def cut(self) -> None:
        """Pull the cable out."""
        _ip("-n", self._names[1], "link", "set", INTERFACE, "down")


def are_possible() -> bool:
    """Whether we may make namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"nn_parallel_try_{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    _ip("netns", "delete", name)
    return True


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Make them, and remove them with what still runs there."""
    names = f"nn_parallel_{os.getpid()}_a", f"nn_parallel_{os.getpid()}_b"
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
        yield Nodes(names)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
