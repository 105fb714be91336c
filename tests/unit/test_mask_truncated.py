"""The callback ``mask-truncated``: plays cut off by a limit are as if they had not been played."""

from __future__ import annotations

import pytest

from relax_algorithms.callbacks.mask_truncated import MaskTruncated
from relax_algorithms.grpo import Grpo
from relax_core.hookspecs import GroupEvent
from relax_core.testing.algorithm_checks import evaluate, example_rows, scored_group
from relax_core.testing.training import tiny_run
from relax_core.types import Group, Stop, Task, Trajectory


def play(stop: Stop, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(Task("t", ()), 0, 0, stop=stop, reward=reward, raw_reward=reward)


def shaped(plays: list[Trajectory]) -> list[float | None]:
    group = Group("t@0", 0, plays[0].task, 0, plays)
    return MaskTruncated().shape_rewards(tiny_run(), [t.reward for t in plays], GroupEvent(group))


@pytest.mark.parametrize("stop", Stop)
def test_what_counts_as_cut_off(stop: Stop) -> None:
    masked = stop in (Stop.LENGTH, Stop.TURNS, Stop.TOKENS, Stop.TOOL_CALLS, Stop.TIME)
    t = play(stop, 0.5)
    assert shaped([t]) == [None if masked else 0.5]
    assert t.metrics["masked"] == masked and t.raw_reward == 0.5


def test_the_others_keep_what_they_have() -> None:
    plays = [play(Stop.EOS, 0.0), play(Stop.LENGTH, 1.0), play(Stop.EOS, None), play(Stop.TURNS, None)]
    assert shaped(plays) == [0.0, None, None, None]
    assert [t.metrics["masked"] for t in plays] == [0, 1, 0, 0]


def test_it_has_no_part_in_the_groups_statistics() -> None:
    """Unlike a play whose loss alone is masked: rewards 1, 0 and, cut off, 0. Mean 1/2 of two, not 1/3 of three."""
    grpo = Grpo(Grpo.Config())
    rewards = shaped([play(Stop.EOS, 1.0), play(Stop.EOS, 0.0), play(Stop.LENGTH, 0.0)])
    rows = example_rows(grpo, [scored_group("a", [(r, ["##"]) for r in rewards])])
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert [row.columns["advantages"][0] for row in rows] == pytest.approx([half, -half, 0])
    assert [row.columns["units"] for row in rows] == [2, 2, 0]
    alone = example_rows(grpo, [scored_group("a", [(r, ["##"]) for r in rewards[:2]])])
    assert evaluate(grpo, rows).loss == evaluate(grpo, alone).loss
    masked_loss_alone = example_rows(grpo, [scored_group("a", [(r, ["##"]) for r in (1.0, 0.0, 0.0)])])
    assert masked_loss_alone[0].columns["advantages"][0] == pytest.approx(2 / 3 / (1 / 3**0.5 + 1e-6))
