"""The random numbers of Python, NumPy and torch on the CPU: kept, put back, and drawn beside those of the program."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return where the random numbers of this process are, as tensors and plain numbers."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        _, keys, *rest = numpy.random.get_state()
        state["numpy"] = [torch.from_numpy(keys.astype("int64")), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on where `random_state` was."""
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

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        """Begin with ``seed``, in ``generators`` as well."""
        self._seed = seed
        self._generators = generators
        self._state: tuple[Any, ...] | None = None  # where they stopped

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have everything in this block draw from these numbers."""
        before = self._states()
        try:
            if self._state is None:
                seed_random_numbers(self._seed)
                for generator in self._generators:
                    generator.manual_seed(self._seed)
            else:
                self._go_on(self._state)
            yield
        finally:
            self._state = self._states()
            self._go_on(before)

    def _states(self) -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        own = [generator.get_state() for generator in self._generators]
        return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None, own

    def _go_on(self, states: tuple[Any, ...]) -> None:
        of_python, of_torch, of_numpy, own = states
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)
