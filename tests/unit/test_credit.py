"""Credit: group advantages and the aggregations' weights and units, by numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relax_algorithms import credit
from relax_core.interfaces import ScoredGroup
from relax_core.testing.algorithm_checks import scored_group

HALF = 0.5 / (math.sqrt(0.5) + 1e-6)  # of rewards 1 and 0: deviation 0.5, sample standard deviation sqrt(0.5)

# --- advantages -------------------------------------------------------------------------------------------------------


def test_two_plays() -> None:
    assert credit.group_advantages([1.0, 0.0]) == pytest.approx([HALF, -HALF], abs=1e-12)


def test_three_plays() -> None:
    """Mean 2, deviations -2, 0, 2, sample variance 8 / 2 = 4."""
    assert credit.group_advantages([0.0, 2.0, 4.0]) == pytest.approx([-2 / 2.000001, 0.0, 2 / 2.000001], abs=1e-12)


def test_without_division() -> None:
    assert credit.group_advantages([0.0, 2.0, 4.0], "none").tolist() == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize(("reward", "count"), [(0.1, 7), (2.3, 31)])
def test_equal_rewards_give_exactly_nothing(reward: float, count: int, scale: credit.Scale) -> None:
    """Their float mean is not the reward itself; dividing by the deviation's rounding error would give about 1."""
    reward = float(np.float32(reward))
    assert credit.group_advantages([reward] * count, scale).tolist() == [0.0] * count
    assert credit.group_advantages([reward, None, reward], scale).tolist() == [0.0] * 3


def test_abstentions_are_left_out() -> None:
    assert credit.group_advantages([1.0, None, 0.0, None]) == pytest.approx([HALF, 0.0, -HALF, 0.0], abs=1e-12)


def test_a_reward_that_is_not_finite_abstains() -> None:
    assert credit.group_advantages([1.0, math.nan, 0.0, math.inf]) == pytest.approx([HALF, 0.0, -HALF, 0.0], abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.7], [None, 0.7, None], [None, None], []])
def test_nothing_to_compare_with(rewards: list[float | None]) -> None:
    assert credit.group_advantages(rewards).tolist() == [0.0] * len(rewards)


def test_a_large_mean_costs_no_precision() -> None:
    """A one-pass variance, E[R^2] - E[R]^2, would be 0 here."""
    assert credit.group_advantages([1e9 + 1, 1e9]) == pytest.approx([HALF, -HALF], abs=1e-12)


def test_what_teaches_nothing_is_counted() -> None:
    groups = [
        scored_group("one", [(0.7, ["#"]), (None, ["#"])]),
        scored_group("equal", [(1.0, ["#"]), (1.0, ["#"])]),
        scored_group("useful", [(1.0, ["#"]), (0.0, ["#"]), (None, ["#"])]),
        scored_group("none", [(None, ["#"])]),
    ]
    assert credit.group_metrics(groups) == {
        "groups_of_one": (1.0, 4.0),
        "groups_equal": (1.0, 4.0),
        "abstained": (3.0, 8.0),
    }


# --- leave one out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], [1.0, -1.0]),
        ([1.0, 0.0, 0.0], [1.0, -0.5, -0.5]),
        ([1.0, 1.0, 0.0], [0.5, 0.5, -1.0]),
        ([3.0, 1.0, 2.0, 0.0], [3 - 1.0, 1 - 5 / 3, 2 - 4 / 3, 0 - 2.0]),
        ([1.0, None, 0.0, math.nan], [1.0, 0.0, -1.0, 0.0]),
        ([1e9 + 1, 1e9], [1.0, -1.0]),
    ],
)
def test_leave_one_out(rewards: list[float | None], expected: list[float]) -> None:
    """Exactly: no other form, such as G / (G - 1) times the deviation from the mean, is right to the last digit."""
    assert credit.leave_one_out(rewards).tolist() == expected


@pytest.mark.parametrize(("reward", "count"), [(0.1, 7), (2.3, 31)])
def test_leave_one_out_of_equal_rewards_is_exactly_nothing(reward: float, count: int) -> None:
    reward = float(np.float32(reward))
    assert credit.leave_one_out([reward] * count).tolist() == [0.0] * count
    assert credit.leave_one_out([reward, None, reward, math.inf]).tolist() == [0.0] * 4


@pytest.mark.parametrize("rewards", [[0.7], [None, 0.7, None], [None, None], []])
def test_leave_one_out_with_nothing_to_compare_with(rewards: list[float | None]) -> None:
    assert credit.leave_one_out(rewards).tolist() == [0.0] * len(rewards)


# --- aggregations -----------------------------------------------------------------------------------------------------
# Token losses 1, 2, ... in reading order over the trained tokens.
#   task a: plays of 3 tokens (1 2 3) and, in two rows, of 2 + 4 (4 5 | 6 7 8 9); one abstains
#   task b: a play of 1 token (10), and one that sampled nothing

KINDS: list[credit.Aggregation] = ["token-mean", "sequence-mean", "sequence-sum", "constant", "prompt-mean"]
GROUPS = [
    scored_group("a", [(1.0, ["..###"]), (0.0, [".##", ".#.###"]), (None, [".##"])]),
    scored_group("b", [(1.0, [".#"]), (0.5, ["..."])]),
]
LOSSES = {"a/0/0": [1, 2, 3], "a/1/0": [4, 5], "a/1/1": [6, 7, 8, 9], "b/0/0": [10]}
CONSTANT = 20


def shares(kind: credit.Aggregation, groups: list[ScoredGroup] = GROUPS) -> dict[str, credit.Share]:
    return credit.aggregation(kind, groups, CONSTANT if kind == "constant" else None)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("token-mean", 55 / 10),
        ("sequence-mean", (6 / 3 + 39 / 6 + 10 / 1) / 3),
        ("sequence-sum", (6 + 39 + 10) / 3),
        ("constant", (6 + 39 + 10) / 3 / 20),
        ("prompt-mean", ((6 + 39) / 9 + 10 / 1) / 2),
    ],
)
def test_loss(kind: credit.Aggregation, loss: float) -> None:
    by_row = shares(kind)
    total = sum(by_row[row].weight * sum(losses) for row, losses in LOSSES.items())
    assert total / sum(share.units for share in by_row.values()) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", [(1, 3), (1, 2), (1, 4), (1, 1)]),
        ("sequence-mean", [(1 / 3, 1), (1 / 6, 1), (1 / 6, 0), (1, 1)]),
        ("sequence-sum", [(1, 1), (1, 1), (1, 0), (1, 1)]),
        ("constant", [(1 / 20, 1), (1 / 20, 1), (1 / 20, 0), (1 / 20, 1)]),
        ("prompt-mean", [(1 / 9, 1), (1 / 9, 0), (1 / 9, 0), (1, 1)]),
    ],
)
def test_weights_and_units(kind: credit.Aggregation, expected: list[tuple[float, float]]) -> None:
    found = shares(kind)
    assert [found[row] for row in LOSSES] == expected
    assert found["a/2/0"] == found["b/1/0"] == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_lies_on_the_first_trained_row(kind: credit.Aggregation) -> None:
    found = shares(kind, [scored_group("c", [(None, ["#"]), (1.0, ["..", "#"])])])
    assert [share.units for share in found.values()] == [0, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_all_abstain(kind: credit.Aggregation) -> None:
    assert set(shares(kind, [scored_group("d", [(None, ["##"]), (None, ["#"])])]).values()) == {(0, 0)}


@pytest.mark.parametrize(("kind", "constant"), [("constant", None), ("token-mean", 8)])
def test_a_constant_where_it_belongs(kind: credit.Aggregation, constant: int | None) -> None:
    with pytest.raises(ValueError, match="constant"):
        credit.aggregation(kind, GROUPS, constant)


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns() -> None:
    """A play's advantage stands at each of its sampled tokens, in all its rows; elsewhere 0."""
    spread = credit.spread(GROUPS, [[0.5, -1.5, 9.0], [2.0, 9.0]])
    made = credit.columns(GROUPS, spread, shares("sequence-mean"))
    assert {row: columns["advantages"].tolist() for row, columns in made.items()} == {
        "a/0/0": [0, 0, 0.5, 0.5, 0.5],
        "a/1/0": [0, -1.5, -1.5],
        "a/1/1": [0, -1.5, 0, -1.5, -1.5, -1.5],
        "a/2/0": [0, 0, 0],
        "b/0/0": [0, 2],
        "b/1/0": [0, 0, 0],
    }
    assert {columns["advantages"].dtype for columns in made.values()} == {np.dtype(np.float32)}
    assert (made["a/1/1"]["weight"], made["a/1/1"]["units"]) == (1 / 6, 0)
