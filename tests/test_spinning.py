"""Looking a few times before going to sleep, by a clock that only moves when the core is given away."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from nn_parallel.executor import spinning
from nn_parallel.executor.spinning import CROWDED_S, MOST_BACK_OFF, SPIN_S, Spin


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0, offers=0, away_s=SPIN_S / 4)  # how long others keep the core that is offered

    def offer() -> None:
        clock.offers += 1
        clock.now += clock.away_s

    monkeypatch.setattr(spinning.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(spinning.os, "sched_yield", offer)
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


def assert_left_alone_for(times: int, spin: Spin, clock: SimpleNamespace) -> None:
    """Others keep the core that is offered; after that it is not offered for so many times as long."""
    clock.away_s = 4 * CROWDED_S
    assert looks_and_offers(spin, clock) == (1, 1)
    clock.now += 0.99 * times * clock.away_s
    assert looks_and_offers(spin, clock) == (1, 0)
    clock.now += 0.02 * times * clock.away_s


def test_where_others_keep_the_core_it_is_left_to_them_for_longer_and_longer(clock) -> None:
    spin = Spin()
    for times in (1, 2, 4, 8, 16, 32, MOST_BACK_OFF, MOST_BACK_OFF):
        assert_left_alone_for(times, spin, clock)


def test_answers_in_time_shorten_that_again(clock) -> None:
    spin = Spin()
    for times in (1, 2, 4):
        assert_left_alone_for(times, spin, clock)
    for _ in range(64 * 3):
        clock.away_s = SPIN_S / 4
        assert spin.until(lambda: True)
    assert_left_alone_for(1, spin, clock)
