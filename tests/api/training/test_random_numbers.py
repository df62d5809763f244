"""The random numbers of this process: seeded, kept, given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_USE_OF_NUMPY = """
import sys

import pytest
from nn_parallel.training._shares import RankSampler

class Shuffled:
    def __iter__(self):
        import numpy
        return iter(numpy.random.permutation(100).tolist())

assert "numpy" in sys.modules and "numpy.random" not in sys.modules
first, again = (list(RankSampler(Shuffled(), 0, 1, seed=0, pad=True, drop=False, batch_size=1)) for _ in range(2))
assert first == again
"""


@pytest.mark.slow
def test_the_first_use_of_numpy_is_seeded_too() -> None:
    """NumPy loads its random numbers when they are first used: by the sampler, in a new process."""
    subprocess.run([sys.executable, "-c", FIRST_USE_OF_NUMPY], check=True)
