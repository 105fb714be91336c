"""RLOO: settings, advantages and loss by numbers worked out by hand. Legend: B rows, T tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from relax_algorithms.rloo import Rloo
from relax_core.interfaces import Batch, Outputs
from relax_core.testing import algorithm_checks as checks
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, scored_group


def rloo(**settings: Any) -> Rloo:
    return Rloo(Rloo.Config.model_validate(settings))


def by_hand() -> tuple[Batch, torch.Tensor]:
    """Ratios 1.5, 0.5, 1.5, 0.5 at advantages 1, 1, -1, -1, in a row that weighs 1/2."""
    ratio_BT = torch.tensor([[1.5, 0.5, 1.5, 0.5]])
    old_BT = torch.full_like(ratio_BT, -2.0)
    mask_BT, advantages_BT = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    weight_B, units_B, sequence_B = torch.tensor([0.5]), torch.ones(1), torch.zeros(1, dtype=torch.long)
    batch = Batch(0, mask_BT.long(), mask_BT, old_BT, old_BT, advantages_BT, weight_B, units_B, sequence_B)
    return batch, (old_BT + ratio_BT.log()).requires_grad_()


@pytest.mark.parametrize("bound", [{"clip_low": 0.1}, {"clip_high": 0.3}, {"dual_clip": 3.0}], ids=str)
def test_no_bounds_without_a_clip(bound: dict[str, float]) -> None:
    (name,) = bound
    with pytest.raises(ValidationError, match=f"{name}: clip is false and so nothing is clipped"):
        rloo(clip=False, **bound)
    assert getattr(rloo(clip=True, **bound).config, name) == bound[name]


def test_advantages() -> None:
    """Rewards 1, 0 and 0.5: less the means of the others, 0.25, 0.75 and 0.5. No deviation divides."""
    groups = [scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"]), (0.5, ["##"])])]
    made = rloo().advantages(groups)
    assert [columns["advantages"].tolist() for columns in made.values()] == [
        [0, 0.75, 0.75],
        [0, -0.75],
        [0, -0.75, 0, -0.75],
        [0],
        [0, 0],
    ]
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1, 2), (1, 1), (1, 2), (0, 0), (1, 2)]


def test_a_single_valid_play_and_equal_plays_teach_nothing() -> None:
    for members in ([(0.7, ["##"]), (None, ["#"])], [(0.1, ["#"]), (0.1, ["##"]), (0.1, ["#"])]):
        rows = example_rows(rloo(), [scored_group("a", members)])
        assert not any(row.columns["advantages"].any() for row in rows)
        assert not evaluate(rloo(), rows).gradients["logprobs"].any()


def test_loss() -> None:
    """Token losses -1.2 (clipped), -0.5, 1.5, 0.8 (clipped)."""
    batch, logprobs_BT = by_hand()
    loss = rloo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * 0.6)
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([0, -0.25, 0.75, 0])
    assert [metric.item() for metric in loss.metrics["clipped"]] == [2, 4]
    bounded = rloo(dual_clip=1.25).loss(batch, Outputs(logprobs_BT))
    assert bounded.total.item() == pytest.approx(0.5 * 0.35)


def test_loss_without_a_clip() -> None:
    """-r A: -1.5, -0.5, 1.5, 0.5, whose gradients are themselves."""
    batch, logprobs_BT = by_hand()
    loss = rloo(clip=False).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0)
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([-0.75, -0.25, 0.75, 0.25])
    assert [metric.item() for metric in loss.metrics["clipped"]] == [0, 4]
    assert [metric.item() for metric in loss.metrics["ratio"]] == pytest.approx([4, 4])


def test_keeps_the_promises_of_every_algorithm() -> None:
    check_algorithm(rloo())


def test_keeps_them_without_a_clip() -> None:
    """But for ``check_awkward``: its ratios of e^20 with either sign cancel out in the reported loss, a float32."""
    algorithm = rloo(clip=False)
    checks.check_columns(algorithm)
    checks.check_cuts(algorithm)
    checks.check_masked(algorithm)
    checks.check_untrained(algorithm)
    checks.check_ratio_one(algorithm)
