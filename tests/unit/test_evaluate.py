"""Evaluation results: mean@n, standard error, pass@k, and plays that count for nothing."""

from __future__ import annotations

import math
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.config.schema import EvaluationSection
from relax_core.evaluate import pass_at, summarize
from relax_core.types import Group, PlayError, Task, Trajectory

RUN: Any = SimpleNamespace(config=SimpleNamespace(rewards=[SimpleNamespace(label="exact")]))


def groups(*values: list[float | None]) -> list[Group]:
    """One list a task: the value of each play's reward; NaN stands for a play that failed."""
    found = []
    for i, plays in enumerate(values):
        task = Task(str(i), ())
        group = Group(str(i), i, task, 0)
        for member, value in enumerate(plays):
            failed = isinstance(value, float) and math.isnan(value)
            trajectory = Trajectory(task, 0, member, error=PlayError("", "", "") if failed else None)
            if not failed:
                trajectory.rewards, trajectory.reward = {"exact": value}, value
            group.trajectories.append(trajectory)
        found.append(group)
    return found


def section(n: int) -> EvaluationSection:
    return EvaluationSection(name="held-out", environment="e", n=n)


def test_by_hand() -> None:
    found = summarize(groups([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]), section(2), RUN)
    assert found["accuracy"] == 0.5 and found["items"] == 4 and found["n"] == 2
    # means of the tasks: 0.5, 1, 0, 0.5; their deviation sqrt(0.5 / 3), divided by sqrt(4)
    assert found["stderr"] == pytest.approx(math.sqrt(0.5 / 3) / 2)
    assert found["pass@1"] == 0.5 and found["pass@2"] == 0.75


def test_failed_and_abstaining_plays_are_left_out_and_counted() -> None:
    found = summarize(groups([1.0, math.nan], [None, 0.0], [None, math.nan]), section(2), RUN)
    assert found["accuracy"] == 0.5 and found["failed"] == 2 and found["unjudged"] == 4
    assert found["pass@1"] == 0.5 and math.isnan(found["pass@2"])


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (7, 3)])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_play(n: int, correct: int) -> None:
    plays = [i < correct for i in range(n)]
    for k in range(1, n + 1):
        draws = list(combinations(plays, k))
        assert pass_at(k, n, correct) == pytest.approx(sum(map(any, draws)) / len(draws))
