"""Returns and generalised advantages by hand, over masks with observations and over several rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from relax_algorithms import credit, returns
from relax_algorithms.options import Kl
from relax_core.interfaces import Member, Row

NAN = math.nan


def member(*rows: dict[str, Sequence[float]]) -> Member:
    """A member from the columns of its rows; log-probs that a row does not give are -1."""
    found = []
    for s, columns in enumerate(rows):
        whole = {"logprobs": [-1.0 if sampled else NAN for sampled in columns["mask"]], **columns}
        arrays = {name: np.array(v, np.int8 if name == "mask" else np.float32) for name, v in whole.items()}
        found.append(Row(f"g/0/{s}", "g", arrays))
    return Member(1.0, {}, found)


@pytest.mark.parametrize(
    ("mask", "gamma", "right"),
    [
        ([1, 1, 0, 0, 1, 1], 1.0, [1, 1, 0, 0, 1, 1]),
        ([1, 0, 1], 0.5, [0.5, 0, 1]),
        ([0, 0, 1], 0.5, [0, 0, 1]),
        ([0, 0, 0], 0.5, [0, 0, 0]),
    ],
)
def test_returns_carry_over_observations(mask: list[int], gamma: float, right: list[float]) -> None:
    """Reward 1 at the end: an observation takes no discount."""
    play = member({"mask": mask})
    found = credit.placed(play, returns.discounted(returns.token_rewards(play, 1.0, None), gamma))
    assert found["g/0/0"].tolist() == right


def test_returns_run_on_over_rows() -> None:
    """Tokens by row: two, none, one; with gamma 0.5 they are 0.25, 0.5 and 1."""
    play = member({"mask": [0, 1, 1]}, {"mask": [0, 0]}, {"mask": [0, 1, 0]})
    found = credit.placed(play, returns.discounted(returns.token_rewards(play, 1.0, None), 0.5))
    assert [values.tolist() for values in found.values()] == [[0, 0.25, 0.5], [0, 0], [0, 1, 0]]


def test_discounted() -> None:
    """4 + 0.5 x 8 = 8; 2 + 0.5 x 8 = 6; 1 + 0.5 x 6 = 4."""
    assert returns.discounted(np.array([1.0, 2, 4, 8]), 0.5).tolist() == [4, 6, 8, 8]
    assert returns.discounted(np.array([1.0, 2, 4]), 0.0).tolist() == [1, 2, 4]
    assert returns.discounted(np.array([1.0, 2, 4]), 1.0).tolist() == [7, 6, 4]
    assert returns.discounted(np.zeros(0), 0.5).shape == (0,)


def test_rewards_with_kl() -> None:
    """k1 = 0.5, -0.25 and 1; by coefficient 0.1 taken from rewards 0, 0 and 1. Observations have none."""
    play = member(
        {"mask": [0, 1, 0, 1], "logprobs": [NAN, -1, NAN, -1], "ref_logprobs": [NAN, -1.5, NAN, -0.75]},
        {"mask": [1, 0], "logprobs": [-1, NAN], "ref_logprobs": [-2, NAN]},
    )
    reward = Kl(place="reward", coefficient=0.1)
    assert returns.token_rewards(play, 1.0, reward) == pytest.approx([-0.05, 0.025, 0.9])
    assert returns.token_rewards(play, 1.0, Kl(coefficient=0.1)).tolist() == [0, 0, 1]
    assert returns.token_rewards(play, 1.0, None).tolist() == [0, 0, 1]


def test_a_play_without_a_token_has_nothing_to_reward() -> None:
    play = member({"mask": [0, 0], "ref_logprobs": [NAN, NAN]})
    assert returns.token_rewards(play, 1.0, Kl(place="reward", coefficient=0.1)).shape == (0,)
    assert returns.gae(np.zeros(0), np.zeros(0), 0.9, 0.8).shape == (0,)


def test_generalised_advantages() -> None:
    """Gamma 0.9, lam 0.8: tokens over two rows with values 0.5, 0.2, 0.4, and reward 1 at the end.

    delta = 0.9 x 0.2 - 0.5 = -0.32, 0.9 x 0.4 - 0.2 = 0.16, 1 - 0.4 = 0.6; with gamma lam = 0.72
    A_2 = 0.6, A_1 = 0.16 + 0.72 x 0.6 = 0.592, A_0 = -0.32 + 0.72 x 0.592 = 0.10624.
    """
    play = member({"mask": [0, 1, 0, 1], "values": [NAN, 0.5, NAN, 0.2]}, {"mask": [0, 1], "values": [NAN, 0.4]})
    rewards, values = returns.token_rewards(play, 1.0, None), credit.sampled(play, "values")
    found = credit.placed(play, returns.gae(rewards, values, 0.9, 0.8))
    assert found["g/0/0"] == pytest.approx([0, 0.10624, 0, 0.592])
    assert found["g/0/1"] == pytest.approx([0, 0.6])


def test_the_ends_of_lam() -> None:
    """lam 1: the return less the value. lam 0: the error of one step."""
    rewards, values = np.array([0.5, -1, 2]), np.array([1.0, 3, -2])
    assert returns.gae(rewards, values, 0.5, 1.0) == pytest.approx(returns.discounted(rewards, 0.5) - values)
    assert returns.gae(rewards, values, 0.5, 0.0) == pytest.approx([0.5 + 1.5 - 1, -1 - 1 - 3, 2 + 2])


def test_a_value_for_each_token() -> None:
    with pytest.raises(ValueError, match="3 rewards and 2 values"):
        returns.gae(np.zeros(3), np.zeros(2), 1.0, 1.0)
