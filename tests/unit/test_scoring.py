"""Scoring groups: sums, abstentions, and graders that fail."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from relax_core.config.schema import RewardSection
from relax_core.interfaces import Reward
from relax_core.scoring import Scorer, number_or_problem
from relax_core.types import Group, PlayError, Task, Trajectory


class Given(Reward):
    """Gives what it was told to, or raises it."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        value = self.config
        if isinstance(value, BaseException):
            raise value
        return value  # type: ignore[no-any-return]


def scored(*rewards: tuple[Any, float], failed: bool = False) -> tuple[Trajectory, Scorer, list[str]]:
    notes: list[str] = []
    given = [
        (RewardSection(id="given", name=f"r{i}", weight=weight), Given(value))
        for i, (value, weight) in enumerate(rewards)
    ]
    scorer = Scorer(given, notes.append)
    trajectory = Trajectory(Task("t", ()), 0, 0, error=PlayError("", "", "") if failed else None)
    asyncio.run(scorer.score(Group("g", 0, Task("t", ()), 0, [trajectory])))
    return trajectory, scorer, notes


def test_weighted_sum() -> None:
    assert scored((1.0, 0.8), (0.5, 0.2))[0].reward == pytest.approx(0.9)


def test_zero_is_a_value_and_none_is_not() -> None:
    assert scored((0.0, 1.0), (None, 5.0))[0].reward == 0.0
    trajectory = scored((None, 1.0), (None, 1.0))[0]
    assert trajectory.reward is None and trajectory.rewards == {"r0": None, "r1": None}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (ValueError("down"), "ValueError: down"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("good", "'good' is not a number"),
    ],
)
def test_a_failure_abstains_is_counted_and_said_once(bad: Any, said: str) -> None:
    trajectory, scorer, notes = scored((bad, 1.0), (1.0, 0.5))
    assert trajectory.reward == 0.5 and trajectory.rewards == {"r0": None, "r1": 1.0}
    assert trajectory.metrics == {"r0/failures": 1.0} and scorer.failures == {"r0": 1}
    assert len(notes) == 1 and said in notes[0]


def test_a_cancelled_grader_is_a_cancellation() -> None:
    with pytest.raises(asyncio.CancelledError):
        number_or_problem(asyncio.CancelledError())


def test_a_failed_play_has_no_rewards() -> None:
    trajectory = scored((1.0, 1.0), failed=True)[0]
    assert trajectory.reward is None and trajectory.rewards == {}
