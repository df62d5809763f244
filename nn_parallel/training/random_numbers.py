"""The random numbers of Python, NumPy and torch on the CPU: kept, put back, and drawn beside those of the program."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Where the random numbers of this process are, as tensors and plain numbers."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        _, keys, *rest = numpy.random.get_state()
        state["numpy"] = [torch.from_numpy(keys.astype("int64")), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy.random

        keys, *rest = state["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy(), *rest))


def seed_random_numbers(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class OwnRandomNumbers:
    """Random numbers that begin with a seed, and go on each time they are used; those of the program stay as they are.

    Example::

        numbers = OwnRandomNumbers(0)
        with numbers.used():
            random.random()  # 0.8444218515250481
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._state = seed, dict[str, Any]()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        before = random_state()
        try:
            if self._state:
                set_random_state(self._state)
            else:
                seed_random_numbers(self._seed)
            yield
        finally:
            self._state = random_state()
            set_random_state(before)
