"""What tests of the pool share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.wire import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = Ends()
    yield pair
    pair.sender.close()
    pair.receiver.close()
    pair.files.close()
