"""What tests of the pool share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nn_parallel._engine.pool import memory_files
from tests.support.wire import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    memory_files._reusable_files.clear()  # of other tests
    pair = Ends()
    yield pair
    memory_files._reusable_files.clear()
    pair.sender.close()
    pair.receiver.close()
