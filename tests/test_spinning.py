"""Looking a few times before going to sleep, by a clock that only moves when the core is given away."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from nn_parallel.executor import spinning
from nn_parallel.executor.spinning import BACK_OFF, CROWDED_S, SPIN_S, Spin


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0, away_s=SPIN_S / 4)  # how long others keep the core when it is offered to them
    monkeypatch.setattr(spinning.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(spinning.os, "sched_yield", lambda: setattr(clock, "now", clock.now + clock.away_s))
    return clock


def looks(spin: Spin) -> int:
    """How often it looks for what does not come."""
    count = itertools.count()
    assert spin.until(lambda: next(count) < 0) is False
    return next(count)


def test_what_is_there_is_found_at_the_first_look(clock) -> None:
    count = itertools.count(1)
    assert Spin().until(lambda: next(count)) == 1
    assert clock.now == 0


def test_what_comes_soon_is_found(clock) -> None:
    coming = itertools.chain([0, 0, 5], itertools.repeat(0))
    assert Spin().until(lambda: next(coming)) == 5


def test_what_does_not_come_is_not_looked_for_any_longer(clock) -> None:
    spin = Spin()
    assert [looks(spin), looks(spin)] == [5, 5]


def test_where_others_keep_the_core_it_is_left_to_them_for_a_while(clock) -> None:
    spin, clock.away_s = Spin(), 4 * CROWDED_S
    assert looks(spin) == 2
    assert looks(spin) == 1, "they would keep it as long again"
    clock.now += clock.away_s * (BACK_OFF - 1)
    assert looks(spin) == 1
    clock.now += clock.away_s * 2
    assert looks(spin) == 2
