"""The callback ``overlong``: a penalty by length, as DAPO writes it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from relax_algorithms.callbacks.overlong import Overlong, penalty
from relax_core.config.schema import SamplingSection
from relax_core.hookspecs import GroupEvent
from relax_core.testing.training import tiny_run
from relax_core.types import Group, PlayError, Stop, Task, Trajectory, Turn, message


def play(*turns: int, reward: float | None = 1.0, error: bool = False) -> Trajectory:
    """A play of turns of so many sampled tokens each."""
    said = [Turn((), message("assistant", ""), Stop.EOS, tokens) for tokens in turns]
    failed = PlayError("environments.toy", "RuntimeError", "down") if error else None
    return Trajectory(Task("t", ()), 0, 0, said, error=failed, reward=reward, raw_reward=reward)


def shaped(plays: list[Trajectory], max_new_tokens: int = 256, **settings: Any) -> list[float | None]:
    run = tiny_run(sampling=SamplingSection(max_new_tokens=max_new_tokens))
    callback = Overlong(Overlong.Config(**settings))
    return callback.shape_rewards(run, [t.reward for t in plays], GroupEvent(Group("t@0", 0, plays[0].task, 0, plays)))


@pytest.mark.parametrize(
    ("length", "buffer", "expected"),
    [
        (79, 20, 0.0),
        (80, 20, 0.0),
        (81, 20, -0.05),
        (99, 20, -0.95),
        (100, 20, -1.0),
        (101, 20, -1.0),
        (79, 0, 0.0),
        (80, 0, 0.0),
        (81, 0, 0.0),
        (99, 0, 0.0),
        (100, 0, 0.0),
        (101, 0, -1.0),
        (0, 0, 0.0),
        (0, 100, 0.0),
        (1, 100, -0.01),
        (10**9, 20, -1.0),
    ],
)
def test_the_penalty_by_length(length: int, buffer: int, expected: float) -> None:
    """L = 100. Between L - B and L it is ((L - B) - length) / B; without a buffer L is a cliff."""
    assert penalty(length, 100, buffer) == pytest.approx(expected)
    assert shaped([play(length)], limit=100, buffer=buffer) == [pytest.approx(1 + expected)]


def test_it_falls_evenly_and_is_always_a_number() -> None:
    values = [penalty(length, 100, 20) for length in range(130)]
    assert all(math.isfinite(value) for value in values)
    steps = [a - b for a, b in pairwise(values)]
    assert steps == pytest.approx([0] * 80 + [0.05] * 20 + [0] * 29)


def test_all_turns_of_a_play_count() -> None:
    assert shaped([play(40, 45, 5), play(90), play(40, 40)], limit=100, buffer=20) == pytest.approx([0.5, 0.5, 1.0])


def test_the_limit_of_sampling_is_the_default() -> None:
    assert shaped([play(10), play(9), play(8)], max_new_tokens=10, buffer=2) == pytest.approx([0.0, 0.5, 1.0])


def test_the_weight_is_the_full_penalty() -> None:
    assert shaped([play(101), play(90)], limit=100, buffer=20, weight=0.4) == pytest.approx([0.6, 0.8])


def test_without_a_reward_a_play_stays_without() -> None:
    plays = [play(101, reward=None), play(101), play(5, reward=None, error=True)]
    assert shaped(plays, limit=100, buffer=20) == [None, 0.0, None]
    assert [t.raw_reward for t in plays] == [None, 1.0, None]


def lines(max_new_tokens: int = 256, **settings: Any) -> list[str]:
    run = tiny_run(sampling=SamplingSection(max_new_tokens=max_new_tokens)).config
    return list(Overlong.check(Overlong.Config(**settings), run))


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    (line,) = lines(limit=100, buffer=101)
    assert line.startswith("buffer: found 101, more than limit 100:") and "lower buffer, or raise limit" in line
    (line,) = lines(max_new_tokens=16, buffer=17)
    assert "more than limit 16 (sampling.max_new_tokens, the default)" in line
    assert not lines(limit=100, buffer=100) and not lines(max_new_tokens=16, buffer=16) and not lines(buffer=0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "buffer"),
        ({"buffer": -1}, "buffer"),
        ({"buffer": 1, "limit": 0}, "limit"),
        ({"buffer": 1, "weight": 0}, "weight"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Overlong.Config.model_validate(settings)
