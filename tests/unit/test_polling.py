"""Looking a few times before going to sleep, by a clock that only moves when the core is given away."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from nn_parallel._engine import polling
from nn_parallel._engine.polling import CREDIT_S, CROWDED_S, LOSS_SHARE, SPIN_S, Spin


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0, offers=0, away_s=SPIN_S / 4)  # how long others keep the core that is offered

    def offer() -> None:
        clock.offers += 1
        clock.now += clock.away_s

    monkeypatch.setattr(polling.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(polling.os, "sched_yield", offer)
    return clock


def looks_and_offers(spin: Spin, clock: SimpleNamespace) -> tuple[int, int]:
    """How often it looks for what does not come, and how often it offers the core meanwhile."""
    count, before = itertools.count(), clock.offers
    assert spin.until(lambda: next(count) < 0) is False
    return next(count), clock.offers - before


def test_the_core_is_offered_once_before_what_is_there_is_found(clock) -> None:
    count = itertools.count(1)
    assert Spin().until(lambda: next(count)) == 1
    assert clock.offers == 1


def test_what_comes_soon_is_found(clock) -> None:
    coming = itertools.chain([0, 0, 5], itertools.repeat(0))
    assert Spin().until(lambda: next(coming)) == 5


def test_what_does_not_come_is_not_looked_for_any_longer(clock) -> None:
    spin = Spin()
    assert [looks_and_offers(spin, clock) for _ in range(2)] == [(4, 4), (4, 4)]


def test_where_others_compute_little_of_the_time_is_lost(clock) -> None:
    spin, clock.away_s = Spin(), 4 * CROWDED_S
    while clock.now < 60:
        clock.now += 1e-3  # between two waits
        assert spin.until(lambda: True)
    lost = clock.offers * clock.away_s
    assert LOSS_SHARE * 60 < lost <= LOSS_SHARE * 60 + CREDIT_S + clock.away_s


def test_where_that_is_rare_nothing_changes(clock) -> None:
    spin = Spin()
    for wait in range(10_000):
        clock.away_s = 4 * CROWDED_S if wait % 1000 == 0 else 1e-5
        clock.now += 4e-4
        assert spin.until(lambda: True)
    assert clock.offers == 10_000
