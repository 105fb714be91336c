"""Reward ``number``: the last number of the reply, compared exactly."""

from __future__ import annotations

import asyncio

import pytest

from relax_core.interfaces import ComponentConfig
from relax_core.types import PlayError, Stop, Task, Trajectory, Turn, message
from relax_envs.rewards.number import Number


def reward(answer: object, reply: str, error: PlayError | None = None) -> float | None:
    turn = Turn((), message("assistant", reply), Stop.EOS, 1)
    return asyncio.run(Number(ComponentConfig())(Trajectory(Task("t", (), answer), 0, 0, [turn], error=error)))


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("4", "The GCD is 4.", 1.0),
        ("4", "of 12 and 8 it is 4", 1.0),
        ("4", "4 divides 12", 0.0),
        ("1000", "1,000.0", 1.0),
        (4, "4", 1.0),
        ("-3", "-3", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("4", "four", 0.0),
        ("4", "", 0.0),
        ("4", "4" * 5000, 0.0),
    ],
)
def test_the_last_number_counts(answer: object, reply: str, right: float) -> None:
    assert reward(answer, reply) == right


def test_it_abstains_without_a_number_to_compare_with_and_for_failed_plays() -> None:
    assert reward("four", "4") is None and reward(None, "4") is None
    assert reward("4", "4", PlayError("", "", "")) is None
