"""CISPO: settings, advantages and loss by numbers worked out by hand. Legend: B rows, T tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from relax_algorithms.cispo import Cispo
from relax_core.interfaces import Batch, Outputs
from relax_core.testing.algorithm_checks import check_algorithm, scored_group

NAN = math.nan


def cispo(**settings: Any) -> Cispo:
    return Cispo(Cispo.Config.model_validate(settings))


def by_hand() -> tuple[Batch, torch.Tensor]:
    """log pi = -1; ratios 1.5, 1.1, 0.1, 1.5, 1.5 at advantages 1, 2, -1, -1, 0, then a masked token; weight 1/2."""
    ratio_BT = torch.tensor([[1.5, 1.1, 0.1, 1.5, 1.5, NAN]])
    mask_BT, logprobs_BT = ~ratio_BT.isnan(), torch.where(ratio_BT.isnan(), NAN, -1.0)
    old_BT, advantages_BT = logprobs_BT - ratio_BT.log(), torch.tensor([[1.0, 2.0, -1.0, -1.0, 0.0, NAN]])
    weight_B, units_B, sequence_B = torch.tensor([0.5]), torch.ones(1), torch.zeros(1, dtype=torch.long)
    batch = Batch(0, mask_BT.long(), mask_BT, old_BT, old_BT, advantages_BT, weight_B, units_B, sequence_B)
    return batch, logprobs_BT.requires_grad_()


def test_settings() -> None:
    config = cispo().config
    assert (config.clip_low, config.clip_high, config.aggregation) == (None, 0.2, "token-mean")
    with pytest.raises(ValidationError, match="dual_clip: cispo's weight is bounded for advantages of either sign"):
        cispo(dual_clip=3.0)
    for wrong in ({"clip_low": 10.0}, {"clip_low": 0.0}, {"clip_high": 0.0}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            cispo(**wrong)


def test_advantages() -> None:
    """Rewards 1 and 0: deviation 0.5, standard deviation sqrt(0.5)."""
    made = cispo().advantages([scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"])])])
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert made["a/0/0"]["advantages"] == pytest.approx([0, half, half])
    assert made["a/1/1"]["advantages"] == pytest.approx([0, -half, 0, -half])
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1, 2), (1, 1), (1, 2), (0, 0)]


def test_loss() -> None:
    """Weights 1.2 (bounded), 1.1, 0.1, 1.2 (bounded), times -A log pi = A: 1.2, 2.2, -0.1, -1.2 and 0.

    No gradient vanishes, on either side of any bound: it is -w A. Where a clip would end it (r = 1.5 with A = 1) it is
    -1.2, and where a clip would let it be r (r = 1.5 with A = -1) it is 1.2 as well.
    """
    batch, logprobs_BT = by_hand()
    loss = cispo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * (1.2 + 2.2 - 0.1 - 1.2))
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([-0.6, -1.1, 0.05, 0.6, 0, 0])


def test_a_lower_bound() -> None:
    """The third token's weight is 0.8 in place of 0.1."""
    batch, logprobs_BT = by_hand()
    loss = cispo(clip_low=0.2).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * (1.2 + 2.2 - 0.8 - 1.2))
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([-0.6, -1.1, 0.4, 0.6, 0, 0])
    assert [metric.item() for metric in loss.metrics["bounded"]] == [3, 5]
    none = cispo(clip_low=1.0).loss(batch, Outputs(logprobs_BT))  # a ratio is never below 0
    assert none.total.item() == cispo().loss(batch, Outputs(logprobs_BT)).total.item()


def test_metrics() -> None:
    """Two of five weights are bounded (that of the advantage 0 moves nothing); they sum to 1.2 + 1.1 + 0.1 + 2.4."""
    batch, logprobs_BT = by_hand()
    loss = cispo().loss(batch, Outputs(logprobs_BT))
    assert loss.clipped_BT is not None
    assert loss.clipped_BT.tolist() == [[True, False, False, True, False, False]]
    assert [metric.item() for metric in loss.metrics["bounded"]] == [2, 5]
    assert [metric.item() for metric in loss.metrics["clipped"]] == [2, 5]
    assert [metric.item() for metric in loss.metrics["weight"]] == pytest.approx([4.8, 5])
    rejected = cispo(rejection={"low": 0.999, "high": 1.001}).loss(shifted(batch), Outputs(logprobs_BT))
    assert [metric.item() for metric in rejected.metrics["bounded"]] == [2, 5]
    assert [metric.item() for metric in rejected.metrics["clipped"]] == [5, 5]


def shifted(batch: Batch) -> Batch:
    """The same with an engine that is a little less sure than the old policy."""
    old_BT = batch.old_logprobs_BT
    assert old_BT is not None
    mask_BT, advantages_BT = batch.mask_BT, batch.advantages_BT
    return Batch(
        0, mask_BT.long(), mask_BT, old_BT - 0.1, old_BT, advantages_BT, batch.weight_B, batch.units_B, batch.sequence_B
    )


def test_the_weight_has_no_gradient() -> None:
    """Twice the log-prob at the same ratio doubles the loss and leaves the gradient."""
    batch, logprobs_BT = by_hand()
    far_BT = (2 * logprobs_BT.detach()).requires_grad_()
    old_BT = batch.old_logprobs_BT
    assert old_BT is not None
    mask_BT, advantages_BT = batch.mask_BT, batch.advantages_BT
    moved = Batch(
        0, mask_BT.long(), mask_BT, old_BT, old_BT - 1, advantages_BT, batch.weight_B, batch.units_B, batch.sequence_B
    )
    near, far = (cispo().loss(b, Outputs(log_BT)).total for b, log_BT in ((batch, logprobs_BT), (moved, far_BT)))
    assert far.item() == pytest.approx(2 * near.item())
    torch.testing.assert_close(torch.autograd.grad(far, far_BT)[0], torch.autograd.grad(near, logprobs_BT)[0])


def test_keeps_the_promises_of_every_algorithm() -> None:
    check_algorithm(cispo())
    check_algorithm(cispo(clip_low=0.2, clip_high=3.0))
