"""Rewards ``length`` and ``repetition``: penalties for what a reply is like, right or wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from relax_core.errors import DataError
from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.length import Length
from relax_envs.rewards.repetition import Repetition


@pytest.mark.parametrize(
    ("tokens", "settings", "right"),
    [
        (200, {"max": 200}, 0.0),
        (201, {"max": 200}, -1.0),
        (0, {"max": 200}, 0.0),
        (200, {"max": 200, "buffer": 50}, 0.0),
        (201, {"max": 200, "buffer": 50}, -0.02),
        (225, {"max": 200, "buffer": 50}, -0.5),
        (250, {"max": 200, "buffer": 50}, -1.0),
        (9999, {"max": 200, "buffer": 50}, -1.0),
        (100, {"min": 100}, 0.0),
        (99, {"min": 100}, -1.0),
        (75, {"min": 100, "buffer": 50}, -0.5),
        (10, {"min": 100, "buffer": 50}, -1.0),
        (10**6, {"min": 100}, 0.0),
        (99, {"min": 100, "max": 200, "buffer": 10}, -0.1),
        (150, {"min": 100, "max": 200, "buffer": 10}, 0.0),
        (205, {"min": 100, "max": 200, "buffer": 10}, -0.5),
        (100, {"min": 100, "max": 100, "buffer": 4}, 0.0),
        (99, {"min": 100, "max": 100, "buffer": 4}, -0.25),
        (102, {"min": 100, "max": 100, "buffer": 4}, -0.5),
    ],
)
def test_length_in_tokens(tokens: int, settings: dict[str, Any], right: float) -> None:
    assert rewarded(Length, played("" if not tokens else "x", tokens=tokens), **settings) == pytest.approx(right)


@pytest.mark.parametrize(
    ("replies", "settings", "right"),
    [
        (["one two three"], {"unit": "words", "max": 3}, 0.0),
        (["one two three"], {"unit": "words", "max": 2}, -1.0),
        (["one two", "three"], {"unit": "words", "max": 2}, -1.0),
        (["北京"], {"unit": "characters", "max": 2}, 0.0),
        (["abc"], {"unit": "characters", "max": 2}, -1.0),
        ([], {"unit": "words", "min": 1}, -1.0),
        ([""], {"unit": "characters", "min": 1}, -1.0),
        (["x", "x"], {"max": 9, "buffer": 2}, -0.5),  # 2 x 5 tokens
    ],
)
def test_length_in_other_units_and_over_turns(replies: list[str], settings: dict[str, Any], right: float) -> None:
    assert rewarded(Length, played(*replies, tokens=5), **settings) == right


def test_tokens_that_were_not_counted_are_an_error() -> None:
    with pytest.raises(DataError, match="task 't': the reply's tokens were not counted"):
        rewarded(Length, played("a reply", tokens=0), max=5)
    assert rewarded(Length, played(tokens=0), max=5) == 0.0
    assert rewarded(Length, played("a reply", failed=True), max=5) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no limit is set: give max, min or both"),
        ({"min": 0}, "no limit is set"),
        ({"min": 5, "max": 4}, "min 5 is above max 4"),
        ({"max": 0}, "greater than 0"),
        ({"max": 4, "buffer": 0}, "greater than 0"),
    ],
)
def test_limits_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Length.Config(**settings)


@pytest.mark.parametrize(
    ("reply", "settings", "right"),
    [
        ("", {}, 0.0),
        ("one two", {}, 0.0),
        ("one two three", {}, 0.0),
        ("the quick brown fox jumps over a lazy dog", {}, 0.0),
        ("a b c a b c", {}, -1 / 4),  # abc bca cab abc
        ("A b c a B c", {}, -1 / 4),
        ("x x x x x", {}, -2 / 3),
        ("x x x x x", {"n": 1}, -4 / 5),
        ("x x x x x", {"n": 5}, 0.0),
        ("x x x x x", {"max_penalty": 0.5}, -1 / 3),
        ("x x x x x", {"allowed": 0.5}, -1 / 3),  # 2/3 -> (2/3 - 1/2) / (1/2)
        ("x x x x x", {"allowed": 0.7}, 0.0),
        ("! ! ! ! !", {}, -2 / 3),
        ("!!!!!", {}, -2 / 3),
        ("我爱你我爱你", {}, -1 / 4),
        ("今天天气很好", {}, 0.0),
        ("ねねねねね", {}, -2 / 3),
        ("a" * 102, {}, -99 / 100),
        ("ha" * 51, {}, -98 / 100),
        ("0" * 102, {}, -99 / 100),
    ],
)
def test_repetition(reply: str, settings: dict[str, Any], right: float) -> None:
    assert rewarded(Repetition, played(reply), **settings) == pytest.approx(right)


def test_repetition_over_turns() -> None:
    """N-grams of all replies count together; none spans two replies."""
    assert rewarded(Repetition, played("a b c", "a b c")) == -0.5
    assert rewarded(Repetition, played("a b", "c a b")) == 0.0
    assert rewarded(Repetition, played()) == 0.0
    assert rewarded(Repetition, played("x x x x", failed=True)) is None


def test_endless_replies_cost_little_time() -> None:
    started = time.process_time()
    for piece in ("a", "a ", "北", "!", " ", "word "):
        assert rewarded(Repetition, played(piece * (1_000_000 // len(piece)))) in (0.0, pytest.approx(-1.0, abs=1e-3))
    assert time.process_time() - started < 6


@pytest.mark.parametrize("settings", [{"n": 0}, {"max_penalty": 0.0}, {"max_penalty": -1.0}, {"allowed": 1.0}])
def test_settings_of_repetition_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Repetition.Config(**settings)
