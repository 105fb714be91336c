"""The formulas of losses and metrics, by numbers worked out by hand. Legend: B rows, T tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from relax_algorithms import ops
from relax_core.interfaces import Batch

NAN = math.nan
LN2 = math.log(2)
KlEstimate = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch_of(mask: list[list[int]], weights: list[float]) -> Batch:
    mask_BT = torch.tensor(mask, dtype=torch.bool)
    zeros_BT = torch.zeros(mask_BT.shape)
    return Batch(
        0,
        zeros_BT.long(),
        mask_BT,
        zeros_BT,
        None,
        zeros_BT,
        torch.tensor(weights),
        torch.ones(len(mask)),
        torch.arange(len(mask)),
    )


# --- masks and sums ---------------------------------------------------------------------------------------------------


def test_aggregate() -> None:
    """0.5 x (1 + 3) + 0.25 x 4 = 3; a masked token, a fully masked row and a row of weight 0 add nothing."""
    batch = batch_of([[1, 0, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], [0.5, 0.25, 1.0, 0.0])
    loss_BT = torch.tensor([[1, NAN, 3], [4, NAN, NAN], [NAN, NAN, NAN], [NAN, 1, NAN]], requires_grad=True)
    total = ops.aggregate(loss_BT, batch)
    assert total.item() == 3.0
    (gradient,) = torch.autograd.grad(total, loss_BT)
    assert gradient.tolist() == [[0.5, 0, 0.5], [0.25, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_masked_sum() -> None:
    mask_BT = torch.tensor([[True, True, False]])
    total, count = ops.masked_sum(torch.tensor([[1.5, 2.0, NAN]], requires_grad=True), mask_BT)
    assert (total.item(), count.item(), total.requires_grad) == (3.5, 2.0, False)
    total, count = ops.masked_sum(torch.tensor([[True, False, True]]), mask_BT)
    assert (total.item(), count.item()) == (1.0, 2.0)
    total, count = ops.masked_sum(torch.tensor([[NAN, NAN, NAN]]), torch.zeros_like(mask_BT))
    assert (total.item(), count.item()) == (0.0, 0.0)


# --- ratios and clipping ----------------------------------------------------------------------------------------------


def test_ratio() -> None:
    logprobs_BT = torch.tensor([[LN2, -LN2, 0.25]], requires_grad=True)
    ratio_BT = ops.safe_ratio(logprobs_BT, torch.tensor([[0.0, 0.0, 0.25]]), torch.tensor([[True, True, True]]))
    assert ratio_BT.tolist()[0] == pytest.approx([2.0, 0.5, 1.0])
    (gradient,) = torch.autograd.grad(ratio_BT.sum(), logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([2.0, 0.5, 1.0])


def test_ratio_is_clamped_before_exp() -> None:
    """exp(100) overflows float32."""
    logprobs_BT = torch.tensor([[100.0, -100.0]], requires_grad=True)
    ratio_BT = ops.safe_ratio(logprobs_BT, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert ratio_BT.tolist()[0] == pytest.approx([math.exp(20), math.exp(-20)])
    (gradient,) = torch.autograd.grad(ratio_BT.sum(), logprobs_BT)
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("function", [ops.safe_ratio, ops.k1, ops.k2, ops.k3])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, -1e9])
def test_masked_values_reach_neither_value_nor_gradient(function: KlEstimate, bad: float) -> None:
    logprobs_BT = torch.tensor([[-1.0, bad, -1.0]], requires_grad=True)
    other_BT = torch.tensor([[-1.5, -1.0, bad]])
    value_BT = function(logprobs_BT, other_BT, torch.tensor([[True, False, False]]))
    (gradient,) = torch.autograd.grad(value_BT.sum(), logprobs_BT)
    assert torch.isfinite(value_BT).all()
    assert gradient[0, 0] != 0
    assert gradient[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "gradient"),  # the gradient is that of the ratio
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.0, -2.0, None, 2.0, 2.0),
        (1.1, 2.0, None, -2.2, -2.0),  # inside
        (0.9, -2.0, None, 1.8, 2.0),
        (1.5, 1.0, None, -1.28, 0.0),  # beyond 1 + high, and pushed further: clipped
        (1.5, -1.0, None, 1.5, 1.0),  # beyond 1 + high, but pulled back
        (0.5, 1.0, None, -0.5, -1.0),  # below 1 - low, but pulled back
        (0.5, -1.0, None, 0.8, 0.0),  # below 1 - low, and pushed further: clipped
        (2.0, -1.0, 3.0, 2.0, 1.0),  # below the second clip
        (4.0, -1.0, 3.0, 3.0, 0.0),  # beyond the second clip
        (4.0, -1.0, None, 4.0, 1.0),
        (0.5, -1.0, 3.0, 0.8, 0.0),
        (4.0, 1.0, 3.0, -1.28, 0.0),  # a positive advantage knows no second clip
        (1.5, 0.0, 3.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, dual: float | None, loss: float, gradient: float) -> None:
    ratio_BT = torch.tensor([[ratio]], requires_grad=True)
    loss_BT = ops.clipped_surrogate(ratio_BT, torch.tensor([[advantage]]), low=0.2, high=0.28, dual=dual)
    assert loss_BT.item() == pytest.approx(loss)
    assert torch.autograd.grad(loss_BT.sum(), ratio_BT)[0].item() == pytest.approx(gradient)


def two_trajectories() -> tuple[Tensor, Tensor, Tensor]:
    """log r of a trajectory in two rows (ln 2 | 2 ln 2, 0) and of one of a single token (-ln 2); mask; sequence."""
    log_ratio_BT = torch.tensor([[LN2, NAN, NAN], [2 * LN2, NAN, 0.0], [-LN2, NAN, NAN]])
    mask_BT = torch.tensor([[True, False, False], [True, False, True], [True, False, False]])
    return log_ratio_BT, mask_BT, torch.tensor([0, 0, 1])


def test_sequence_ratio() -> None:
    """(ln 2 + 2 ln 2 + 0) / 3 = ln 2: the trajectory's ratio is 2, over both rows; each token's gradient is it too."""
    log_ratio_BT, mask_BT, sequence_B = two_trajectories()
    log_ratio_BT.requires_grad_()
    ratio_BT = ops.sequence_ratio(log_ratio_BT, mask_BT, sequence_B)
    assert ratio_BT[mask_BT].tolist() == pytest.approx([2, 2, 2, 0.5])
    (gradient,) = torch.autograd.grad(ops.masked(ratio_BT, mask_BT).sum(), log_ratio_BT)
    assert gradient.tolist() == [pytest.approx(row) for row in ([2, 0, 0], [2, 0, 2], [0.5, 0, 0])]


def test_sequence_ratio_has_the_gradient_of_the_geometric_mean() -> None:
    """Averaged over the trajectory's tokens, the token form has the gradient of s = exp(sum of log r / length)."""
    log_ratio_BT, mask_BT, sequence_B = two_trajectories()
    log_ratio_BT.requires_grad_()
    ratio_BT = ops.sequence_ratio(log_ratio_BT, mask_BT, sequence_B)
    token_form = ops.masked(ratio_BT, mask_BT)[:2].sum() / 3 + ratio_BT[2, 0]
    first = log_ratio_BT[:2][mask_BT[:2]]
    written = (first.sum() / len(first)).exp() + log_ratio_BT[2, 0].exp()
    assert token_form.item() == pytest.approx(written.item()) == 2.5
    found, expected = (torch.autograd.grad(total, log_ratio_BT)[0] for total in (token_form, written))
    torch.testing.assert_close(found, expected)
    assert expected[0].tolist() == pytest.approx([2 / 3, 0, 0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "weight"),  # tau is 1 for positive advantages, 2 for others
    [
        (1.0, 3.0, -4 / 1 * 0.5 * 3, 1.0),
        (1.0, -3.0, 4 / 2 * 0.5 * 3, 1.0),
        (1 + math.log(3), 1.0, -4 / 1 * 0.75, 0.75),  # p = 3/4, 4 p (1 - p) = 3/4
        (1 + math.log(3) / 2, -1.0, 4 / 2 * 0.75, 0.75),
        (1 - math.log(3) / 2, -1.0, 4 / 2 * 0.25, 0.75),  # p = 1/4: the gate falls on both sides
        (1e8, 1.0, -4.0, 0.0),
    ],
)
def test_soft_gate(ratio: float, advantage: float, loss: float, weight: float) -> None:
    ratio_BT, advantages_BT = torch.tensor([[ratio]], requires_grad=True), torch.tensor([[advantage]])
    loss_BT = ops.soft_gate(ratio_BT, advantages_BT, 1.0, 2.0)
    assert loss_BT.item() == pytest.approx(loss)
    (gradient,) = torch.autograd.grad(loss_BT.sum(), ratio_BT)
    assert gradient.item() == pytest.approx(-weight * advantage)
    weight_BT = ops.soft_gate_weight(ratio_BT, advantages_BT, 1.0, 2.0)
    assert weight_BT.item() == pytest.approx(weight) and not weight_BT.requires_grad


def test_bounded_weight() -> None:
    ratio_BT = torch.tensor([[0.01, 0.5, 1.0, 1.5]], requires_grad=True)
    assert ops.bounded_weight(ratio_BT, None, 0.2).tolist()[0] == pytest.approx([0.01, 0.5, 1.0, 1.2])
    assert ops.bounded_weight(ratio_BT, 0.4, 1.0).tolist()[0] == pytest.approx([0.6, 0.6, 1.0, 1.5])
    assert not ops.bounded_weight(ratio_BT, None, 0.2).requires_grad


def test_entropy_bonus() -> None:
    entropy_BT = torch.tensor([[2.0, NAN]], requires_grad=True)
    loss_BT = ops.entropy_bonus(entropy_BT, 0.1, torch.tensor([[True, False]]))
    assert loss_BT.tolist()[0] == pytest.approx([-0.2, 0.0])
    (gradient,) = torch.autograd.grad(loss_BT.sum(), entropy_BT)
    assert gradient.tolist()[0] == pytest.approx([-0.1, 0.0])


# --- Kullback-Leibler divergence --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimate", "values", "gradients"),  # at d = ln 2, -ln 2 and 0
    [
        (ops.k1, [LN2, -LN2, 0], [1, 1, 1]),
        (ops.k2, [LN2**2 / 2, LN2**2 / 2, 0], [LN2, -LN2, 0]),
        (ops.k3, [0.5 - 1 + LN2, 2 - 1 - LN2, 0], [1 - 0.5, 1 - 2, 0]),
    ],
)
def test_kl(estimate: KlEstimate, values: list[float], gradients: list[float]) -> None:
    logprobs_BT = torch.tensor([[-1 + LN2, -1 - LN2, -1]], requires_grad=True)
    value_BT = estimate(logprobs_BT, torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool))
    assert value_BT.tolist()[0] == pytest.approx(values, abs=1e-6)
    (gradient,) = torch.autograd.grad(value_BT.sum(), logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx(gradients, abs=1e-6)


def test_k3_is_clamped_before_exp() -> None:
    logprobs_BT = torch.tensor([[-200.0]], requires_grad=True)
    value_BT = ops.k3(logprobs_BT, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert value_BT.item() == pytest.approx(math.exp(20) - 1 - 20)
    assert torch.autograd.grad(value_BT.sum(), logprobs_BT)[0].item() == 0


@pytest.mark.parametrize("estimate", [ops.k2, ops.k3])
def test_kl_as_a_loss_is_the_gradient_of_the_divergence(estimate: KlEstimate) -> None:
    """Its mean over the policy's own tokens has the divergence's gradient (k3's with the sides exchanged).

    Following it, the policy ends at the reference.
    """
    reference = torch.tensor([0.5, -1.0, 0.25]).log_softmax(-1)
    logits = torch.tensor([-0.5, 0.75, 0.0], requires_grad=True)
    for step in range(400):
        policy = logits.log_softmax(-1)
        loss = estimate(policy[None], reference[None], torch.ones(1, 3, dtype=torch.bool))[0]
        expected = (policy.exp() * (policy - reference)).sum()
        if estimate is ops.k3:
            expected = (reference.exp() * (reference - policy)).sum()
        (gradient,) = torch.autograd.grad((policy.detach().exp() * loss).sum(), logits, retain_graph=True)
        if step == 0:
            torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
        logits = (logits - gradient).detach().requires_grad_()
    torch.testing.assert_close(logits.softmax(-1), reference.exp(), atol=1e-4, rtol=0)
