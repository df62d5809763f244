"""Tracebacks as users see them: bounded, and without frames of the package."""

from __future__ import annotations

import dataclasses
import sys
import traceback

import pytest

from nn_parallel._engine.devices import call_on_device
from nn_parallel._engine.failures import Failure, rank_error
from nn_parallel._engine.ranks.environment import detect_launch
from nn_parallel._engine.tracebacks import MAX_TRACEBACK_CHARS, format_traceback, hide_own_frames
from nn_parallel.errors import (
    LaunchError,
)


def _raised(error: BaseException) -> BaseException:
    """``error`` with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_causes_of_the_cause_are_in_the_text() -> None:
    """A chain of exceptions is sent whole, as Python prints it."""
    try:
        try:
            {}["missing"]
        except KeyError as key:
            raise ValueError("outer") from key
    except ValueError as caught:
        text = Failure.from_exception(caught, "Rank 0").traceback
    assert text.index("KeyError: 'missing'") < text.index("direct cause") < text.index("ValueError: outer")


def test_a_long_traceback_keeps_both_ends() -> None:
    """The text is bounded: a store is no place for megabytes; the beginning and the end stay."""
    error = _raised(ValueError("begin" + "x" * 10 * MAX_TRACEBACK_CHARS + "end"))
    text = Failure.from_exception(error, "Rank 1").traceback
    assert len(text) < MAX_TRACEBACK_CHARS + 200
    assert "in _raised" in text
    assert "begin" in text
    assert "[...]" in text
    assert text.endswith("end\n")


def test_our_own_frames_are_left_out() -> None:
    """The traceback begins at the user's code; where there is none of that, ours is better than nothing."""

    def users() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as users_error:
        call_on_device(users, (), {}, None)
    with pytest.raises(LaunchError) as our_error:
        detect_launch({"RANK": "0"})
    texts = [format_traceback(e.value.with_traceback(e.tb.tb_next)) for e in (users_error, our_error)]
    frames = [[line.split(" in ")[1] for line in text.splitlines() if ", line " in line] for text in texts]
    assert frames == [["users"], ["detect_launch"]]


def _frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_uncaught_error_of_the_package_is_shown_without_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user stay, and a debugger finds all of them afterwards."""
    shown = list[list[str]]()
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, frames: shown.append(_frames(error)))
    hide_own_frames.__wrapped__()

    def users() -> None:
        call_on_device(detect_launch, ({"RANK": "0"},), {}, None)

    try:
        users()
    except LaunchError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        whole = _frames(error)
    me = "test_an_uncaught_error_of_the_package_is_shown_without_our_frames"
    assert shown == [[me, "users"]]
    assert whole[:3] == [me, "users", "call_on_device"]


def test_an_uncaught_error_of_the_user_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of the user, or one of ours, needs every frame."""
    shown = list[list[str]]()
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, frames: shown.append(_frames(error)))
    hide_own_frames.__wrapped__()
    try:
        call_on_device(divmod, (1, 0), {}, None)
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [["test_an_uncaught_error_of_the_user_is_shown_whole", "call_on_device"]]


@dataclasses.dataclass
class Unhashable(Exception):
    """Equal to others of its value, and therefore without a hash."""

    value: int


def test_errors_of_any_kind_are_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as cannot be hashed; the group may be the cause of an error of the user, whose frames all stay."""
    shown = list[str]()
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append("".join(traceback.format_exception(*error))))
    hide_own_frames.__wrapped__()

    def fail() -> None:
        raise Unhashable(1)

    try:
        call_on_device(fail, (), {}, None)
    except Unhashable as leaf:
        group = rank_error("fail()", 2, {0: leaf, 1: Unhashable(1)})
    try:
        raise KeyError("user") from group
    except KeyError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert "in fail\n" in shown[0]
    assert "in call_on_device" not in shown[0]
    assert "in test_errors_of_any_kind_are_in_a_group" in shown[0]
