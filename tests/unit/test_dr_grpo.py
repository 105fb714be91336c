"""Dr. GRPO: settings, advantages and loss by numbers worked out by hand. Legend: B rows, T tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from relax_algorithms.dr_grpo import DrGrpo
from relax_core.interfaces import Batch, Outputs, Row
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, make_batch, scored_group

GROUPS = [scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"]), (0.5, ["##"])])]


def dr_grpo(**settings: Any) -> DrGrpo:
    return DrGrpo(DrGrpo.Config.model_validate({"constant": 10, **settings}))


def by_hand() -> tuple[Batch, torch.Tensor]:
    """Ratios 1.5, 0.5, 1.5, 0.5, 1.1 at advantages 1, 1, -1, -1, 2, in a row that weighs 1/10."""
    ratio_BT = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1]])
    old_BT = torch.full_like(ratio_BT, -2.0)
    mask_BT, advantages_BT = torch.ones(1, 5, dtype=torch.bool), torch.tensor([[1.0, 1.0, -1.0, -1.0, 2.0]])
    weight_B, units_B, sequence_B = torch.tensor([0.1]), torch.ones(1), torch.zeros(1, dtype=torch.long)
    batch = Batch(0, mask_BT.long(), mask_BT, old_BT, old_BT, advantages_BT, weight_B, units_B, sequence_B)
    return batch, (old_BT + ratio_BT.log()).requires_grad_()


def test_the_constant_has_no_default() -> None:
    with pytest.raises(ValidationError) as error:
        DrGrpo.Config()
    (found,) = error.value.errors()
    assert "constant is None: set constant to the response limit" in found["msg"]
    assert dr_grpo().config.aggregation == "constant"
    assert dr_grpo(aggregation="token-mean", constant=None).config.constant is None


def test_advantages() -> None:
    """Rewards 1, 0 and 0.5 less their mean 0.5; every trained token weighs 1 / 10, every play counts once."""
    made = dr_grpo().advantages(GROUPS)
    assert [columns["advantages"].tolist() for columns in made.values()] == [
        [0, 0.5, 0.5],
        [0, -0.5],
        [0, -0.5, 0, -0.5],
        [0],
        [0, 0],
    ]
    assert [(c["weight"], c["units"]) for c in made.values()] == [(0.1, 1), (0.1, 1), (0.1, 0), (0, 0), (0.1, 1)]


def test_no_deviation_divides() -> None:
    """Rewards ten times as far apart give advantages ten times as large."""
    made = dr_grpo().advantages([scored_group("a", [(10.0, ["#"]), (0.0, ["#"])])])
    assert [columns["advantages"].tolist() for columns in made.values()] == [[5.0], [-5.0]]


def test_loss() -> None:
    """Token losses -1.2 (clipped), -0.5, 1.5, 0.8 (clipped), -2.2: their sum -1.6 is divided by 10."""
    batch, logprobs_BT = by_hand()
    loss = dr_grpo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(-1.6 / 10)
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([0, -0.5 / 10, 1.5 / 10, 0, -2.2 / 10])
    assert loss.clipped_BT is not None and loss.clipped_BT.tolist() == [[True, False, False, True, False]]
    bounded = dr_grpo(dual_clip=1.25).loss(batch, Outputs(logprobs_BT))  # 1.25 in place of 1.5
    assert bounded.total.item() == pytest.approx(-1.85 / 10)


def test_metrics() -> None:
    """Of five tokens: ratios sum to 5.1, two are clipped."""
    batch, logprobs_BT = by_hand()
    metrics = dr_grpo().loss(batch, Outputs(logprobs_BT)).metrics
    assert [metric.item() for metric in metrics["ratio"]] == pytest.approx([5.1, 5])
    assert [metric.item() for metric in metrics["clipped"]] == [2, 5]


def test_the_length_of_an_answer_does_not_divide() -> None:
    """On policy, each token's gradient is -A / constant / 3 plays: 0.5 / 30 in plays of 2, 3 and 2 tokens alike."""
    rows = [row for row in example_rows(dr_grpo(), GROUPS) if row.columns["weight"]]
    same = [Row(row.id, row.group, {**row.columns, "old_logprobs": row.columns["policy_logprobs"]}) for row in rows]
    gradient = evaluate(dr_grpo(), same).gradients["logprobs"]
    assert sorted(gradient.tolist()) == pytest.approx(sorted([-0.5 / 30] * 2 + [0.5 / 30] * 3 + [0.0] * 3))
    assert make_batch(same).units_B.sum() == 3


def test_keeps_the_promises_of_every_algorithm() -> None:
    check_algorithm(dr_grpo())
