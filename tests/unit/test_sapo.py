"""SAPO: settings, advantages and loss by numbers worked out by hand. Legend: B rows, T tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from relax_algorithms.sapo import Sapo
from relax_core.interfaces import Batch, Outputs
from relax_core.testing.algorithm_checks import check_algorithm, scored_group

LN3 = math.log(3)


def sapo(**settings: Any) -> Sapo:
    return Sapo(Sapo.Config.model_validate(settings))


def batch_of(ratios: list[float], advantages: list[float]) -> tuple[Batch, torch.Tensor]:
    """One row of trained tokens, which weighs 1/2, and its log-probs under the policy."""
    ratio_BT = torch.tensor([ratios])
    old_BT, mask_BT = torch.full_like(ratio_BT, -2.0), torch.ones(1, len(ratios), dtype=torch.bool)
    weight_B, units_B, sequence_B = torch.tensor([0.5]), torch.ones(1), torch.zeros(1, dtype=torch.long)
    batch = Batch(0, mask_BT.long(), mask_BT, old_BT, old_BT, torch.tensor([advantages]), weight_B, units_B, sequence_B)
    return batch, (old_BT + ratio_BT.log()).requires_grad_()


@pytest.mark.parametrize("name", ["clip_low", "clip_high", "dual_clip"])
def test_there_is_no_clip(name: str) -> None:
    with pytest.raises(ValidationError) as error:
        sapo(**{name: 0.2})
    (found,) = error.value.errors()
    assert found["msg"].startswith(f"Value error, {name}: sapo")
    assert "tau_neg" in found["msg"]


def test_defaults_are_the_papers() -> None:
    config = sapo().config
    assert (config.tau_pos, config.tau_neg, config.aggregation) == (1.0, 1.05, "sequence-mean")
    for name in ("tau_pos", "tau_neg"):
        with pytest.raises(ValidationError, match=name):
            sapo(**{name: 0.0})


def test_advantages() -> None:
    """Rewards 1 and 0: deviation 0.5, standard deviation sqrt(0.5)."""
    made = sapo().advantages([scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"])])])
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert made["a/0/0"]["advantages"] == pytest.approx([0, half, half])
    assert made["a/1/1"]["advantages"] == pytest.approx([0, -half, 0, -half])
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1 / 2, 1), (1 / 3, 1), (1 / 3, 0), (0, 0)]


def test_loss() -> None:
    """tau 1 for A > 0, tau 2 otherwise; r - 1 = ln 3 / tau gives p = 3/4, -ln 3 / tau gives p = 1/4.

    ============== === ========================= ==================================
    r              A   loss = -(4 / tau) p A     gradient = -4 p (1 - p) r A
    ============== === ========================= ==================================
    1 + ln 3       2   -4 x 3/4 x 2 = -6         -3/4 x (1 + ln 3) x 2
    1 + ln 3 / 2   -1  2 x 3/4 = 1.5             3/4 x (1 + ln 3 / 2)
    1 - ln 3 / 2   -1  2 x 1/4 = 0.5             3/4 x (1 - ln 3 / 2)
    1              1   -4 x 1/2 = -2             -1
    ============== === ========================= ==================================
    """
    batch, logprobs_BT = batch_of([1 + LN3, 1 + LN3 / 2, 1 - LN3 / 2, 1.0], [2.0, -1.0, -1.0, 1.0])
    loss = sapo(tau_neg=2.0).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * (-6 + 1.5 + 0.5 - 2))
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    expected = [-0.75 * (1 + LN3) * 2, 0.75 * (1 + LN3 / 2), 0.75 * (1 - LN3 / 2), -1.0]
    assert gradient.tolist()[0] == pytest.approx([0.5 * value for value in expected])
    assert [metric.item() for metric in loss.metrics["gate"]] == pytest.approx([3 * 0.75 + 1, 4])
    assert [metric.item() for metric in loss.metrics["clipped"]] == [3, 4]


@pytest.mark.parametrize("tau", [0.1, 1.0, 1.05, 3.0, 20.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_on_policy_the_gate_is_open(tau: float, advantage: float) -> None:
    """At r = 1 the gradient is exactly that of -A log pi, whatever the temperatures."""
    batch, logprobs_BT = batch_of([1.0], [advantage])
    loss = sapo(tau_pos=tau, tau_neg=tau).loss(batch, Outputs(logprobs_BT))
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.item() == pytest.approx(-0.5 * advantage, rel=1e-6)
    assert loss.clipped_BT is not None and not loss.clipped_BT.any()


def test_softly_clipped() -> None:
    """4 p (1 - p) = 0.9 where tanh^2(tau (r - 1) / 2) = 0.1: at r = 1 +- 2 artanh(sqrt(0.1)) / tau = 1 +- 0.65495.

    With tau 1.05 it is 1 +- 0.62376. An advantage of 0 has no gradient that could be lost.
    """
    edge = 2 * math.atanh(math.sqrt(0.1))
    assert edge == pytest.approx(0.65495, abs=1e-4)
    ratios = [1 + edge - 1e-3, 1 + edge + 1e-3, 1 - edge + 1e-3, 1 - edge - 1e-3, 1.64, 1.64, 9.0]
    batch, logprobs_BT = batch_of(ratios, [1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 0.0])
    loss = sapo().loss(batch, Outputs(logprobs_BT))
    assert loss.clipped_BT is not None
    assert loss.clipped_BT.tolist() == [[False, True, False, True, False, True, False]]
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert (gradient[0, :6] != 0).all(), "softly clipped tokens keep a gradient"


def test_a_ratio_that_runs_off_stays_finite() -> None:
    """e^20: the gate is shut, the loss at its bound -4 A, and nothing is NaN."""
    batch, logprobs_BT = batch_of([math.exp(20)], [1.0])
    loss = sapo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(-0.5 * 4)
    assert torch.autograd.grad(loss.total, logprobs_BT)[0].tolist() == [[0.0]]


def test_keeps_the_promises_of_every_algorithm() -> None:
    check_algorithm(sapo())
    check_algorithm(sapo(tau_pos=4.0, tau_neg=2.0))
