"""DAPO: settings, advantages and loss by numbers worked out by hand. Legend: B rows, T tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from relax_algorithms.dapo import Dapo
from relax_core.interfaces import Batch, Outputs
from relax_core.testing.algorithm_checks import check_algorithm, scored_group


def dapo(**settings: Any) -> Dapo:
    return Dapo(Dapo.Config.model_validate(settings))


def by_hand() -> tuple[Batch, torch.Tensor]:
    """Ratios 1.25, 1.5, 0.75, 0.5, 1.5 at advantages 1, 2, -1, -1, -1, in a row that weighs 1."""
    ratio_BT = torch.tensor([[1.25, 1.5, 0.75, 0.5, 1.5]])
    old_BT = torch.full_like(ratio_BT, -2.0)
    mask_BT, advantages_BT = torch.ones(1, 5, dtype=torch.bool), torch.tensor([[1.0, 2.0, -1.0, -1.0, -1.0]])
    weight_B, units_B, sequence_B = torch.ones(1), torch.tensor([5.0]), torch.zeros(1, dtype=torch.long)
    batch = Batch(0, mask_BT.long(), mask_BT, old_BT, old_BT, advantages_BT, weight_B, units_B, sequence_B)
    return batch, (old_BT + ratio_BT.log()).requires_grad_()


def test_defaults_are_the_papers() -> None:
    config = dapo().config
    assert (config.clip_low, config.clip_high, config.aggregation) == (0.2, 0.28, "token-mean")
    assert Dapo.about is not None
    for callback in ("dynamic-sampling", "overlong", "mask-truncated"):
        assert callback in Dapo.about.use


def test_advantages() -> None:
    """Rewards 1 and 0: deviation 0.5, standard deviation sqrt(0.5). Token-mean: units are tokens."""
    made = dapo().advantages([scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"])])])
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert made["a/0/0"]["advantages"] == pytest.approx([0, half, half])
    assert made["a/1/1"]["advantages"] == pytest.approx([0, -half, 0, -half])
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1, 2), (1, 1), (1, 2), (0, 0)]


def test_loss() -> None:
    """Token losses -1.25, -2.56 (clipped at 1.28), 0.8 and 0.8 (clipped at 0.8), 1.5: in all -0.71."""
    batch, logprobs_BT = by_hand()
    loss = dapo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(-1.25 - 2.56 + 0.8 + 0.8 + 1.5)
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([-1.25, 0, 0, 0, 1.5])
    assert loss.clipped_BT is not None and loss.clipped_BT.tolist() == [[False, True, True, True, False]]
    assert [metric.item() for metric in loss.metrics["clipped"]] == [3, 5]
    assert [metric.item() for metric in loss.metrics["ratio"]] == [5.5, 5]


def test_the_upper_clip_is_higher_than_grpos() -> None:
    """At 0.2 the first token, with ratio 1.25, is clipped too: -1.2 and -2.4 in place of -1.25 and -2.56."""
    batch, logprobs_BT = by_hand()
    loss = dapo(clip_high=0.2).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(-1.2 - 2.4 + 0.8 + 0.8 + 1.5)
    assert torch.autograd.grad(loss.total, logprobs_BT)[0][0, 0] == 0


def test_keeps_the_promises_of_every_algorithm() -> None:
    check_algorithm(dapo())
