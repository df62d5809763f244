"""Functions to save, restore, seed and temporarily replace the random states of Python, NumPy and torch on the CPU."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the random states of this process, as tensors and plain numbers, so that a checkpoint can hold them."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        _, keys, *rest = numpy.random.get_state()
        state["numpy"] = [torch.from_numpy(keys.astype("int64")), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random states that `random_state` has returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy.random

        keys, *rest = state["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy(), *rest))


def seed_random_numbers(seed: int) -> None:
    """Seed Python, torch on the CPU, and NumPy if it has been imported."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class OwnRandomNumbers:
    """A sequence of random numbers for a part of the program, separate from the random numbers of the rest.

    The method `used` makes a block, in which everything that draws random numbers draws from this sequence. The
    sequence begins with a seed, and each block continues where the last one ended. After a block, the random numbers of
    the program go on as if nothing had been drawn.

    Example::

        numbers = OwnRandomNumbers(0)
        with numbers.used():
            random.random()  # 0.8444218515250481
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        """Begin the sequence with ``seed``.

        Inside the blocks that `used` makes, ``generators`` draw from sequences of their own, which also begin with
        ``seed``.
        """
        self._seed = seed
        self._generators = generators
        # The random states at the end of the last block that `used` has made; None before the first block.
        self._states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Take all random numbers in the body of the ``with`` statement from this sequence."""
        states_of_program = self._current_states()
        try:
            if self._states is None:
                seed_random_numbers(self._seed)
                for generator in self._generators:
                    generator.manual_seed(self._seed)
            else:
                self._restore(self._states)
            yield
        finally:
            self._states = self._current_states()
            self._restore(states_of_program)

    def _current_states(self) -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        own = [generator.get_state() for generator in self._generators]
        return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None, own

    def _restore(self, states: tuple[Any, ...]) -> None:
        of_python, of_torch, of_numpy, own = states
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)
