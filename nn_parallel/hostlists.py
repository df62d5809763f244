"""SLURM's notation for the hosts of a job and for what runs on each of them."""

from __future__ import annotations

import re

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[^][,\s]|{_RANGES})+"
_HOSTLIST = rf"{_HOST}(?:,{_HOST})*"


def expand_hostlist(text: str) -> list[str]:
    """The hosts that SLURM's notation stands for, in its order.

    Raises:
        ValueError: it is not in that notation.

    Example::

        >>> expand_hostlist("a[1-2,07]-ib,b3")
        ['a1-ib', 'a2-ib', 'a07-ib', 'b3']
    """
    hosts = list[str]()
    for item in _items(text):
        names = [""]
        for literal, ranges in re.findall(r"([^][]+)|\[([^][]+)\]", item):
            parts = [literal] if literal else [number for part in ranges.split(",") for number in _numbers(part)]
            names = [name + part for name in names for part in parts]
        hosts += names
    return hosts


def expand_task_counts(text: str) -> list[int]:
    """How many tasks run on each node.

    Raises:
        ValueError: it is not in SLURM's notation.

    Example::

        >>> expand_task_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts = list[int]()
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"{text!r} does not count the tasks of nodes in SLURM's notation, which is like 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _items(text: str) -> list[str]:
    """The parts of a hostlist between the commas that stand outside of brackets."""
    if not re.fullmatch(_HOSTLIST, text):
        raise ValueError(f"{text!r} is not a list of hosts in SLURM's notation, which is like a[1-2,07]-ib,b3.")
    return re.findall(r"(?:[^][,]|\[[^]]*\])+", text)


def _numbers(text: str) -> list[str]:
    """``08-11`` is 08, 09, 10, 11: as many digits as the first has."""
    first, _, last = text.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(f"[{text}] in a list of hosts goes backwards.")
    return [str(number).zfill(len(first)) for number in numbers]
