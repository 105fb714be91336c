"""The losses of on-policy distillation and their gradients, by numbers worked out by hand.

Legend: B rows, T tokens, K candidates, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_algorithms import divergence as distances
from relax_algorithms.opd import Opd
from relax_core.interfaces import Batch, Outputs

NAN = math.nan
LN = math.log


def opd(**settings: Any) -> Opd:
    return Opd(Opd.Config.model_validate(settings))


def batch_of(
    n: int, *, old: list[float] | None = None, advantages: list[float] | None = None, **columns: Tensor
) -> Batch:
    """One row of ``n`` tokens and a masked one, of weight 0.5; ``columns`` are (n, ...) and get NaN at the masked."""
    return Batch(
        step=0,
        tokens_BT=torch.zeros(1, n + 1, dtype=torch.long),
        mask_BT=torch.tensor([[True] * n + [False]]),
        logprobs_BT=torch.tensor([[*(old or [-1.0] * n), NAN]]),
        old_logprobs_BT=None if old is None else torch.tensor([[*old, NAN]]),
        advantages_BT=torch.tensor([[*(advantages or [0.0] * n), NAN]]),
        weight_B=torch.tensor([0.5]),
        units_B=torch.tensor([1.0]),
        sequence_B=torch.tensor([0]),
        columns={name: on_grid(values) for name, values in columns.items()},
    )


def on_grid(values: Tensor) -> Tensor:
    """(1, n + 1, ...), with NaN at the last."""
    return torch.cat([values, torch.full_like(values[:1], NAN)])[None]


def probabilities(*rows: Any) -> Tensor:
    return torch.tensor(rows).log()


def gradient_of(total: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(total, leaf)
    found: list[float] = gradient.flatten().tolist()
    return found


def test_sampled_by_hand() -> None:
    """Student 1/2, 1/2, 1/4, teacher 1/4, 1/2, 1/2: A = -ln 2, 0, ln 2. With pi_old 1/4, 1/2, 1/2: r = 2, 1, 1/2.

    The gradient of -r A at log pi is -r A, times the weight 0.5.
    """
    logprobs_BT = on_grid(probabilities(1 / 2, 1 / 2, 1 / 4)).requires_grad_()
    teacher = probabilities(1 / 4, 1 / 2, 1 / 2)
    on_policy = opd().loss(batch_of(3, teacher_logprobs=teacher), Outputs(logprobs_BT))
    assert gradient_of(on_policy.total, logprobs_BT) == pytest.approx([0.5 * LN(2), 0, -0.5 * LN(2), 0])
    old = probabilities(1 / 4, 1 / 2, 1 / 2).tolist()
    loss = opd(weight=3.0).loss(batch_of(3, old=old, teacher_logprobs=teacher), Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * 3 * (2 * LN(2) - LN(2) / 2))
    assert gradient_of(loss.total, logprobs_BT) == pytest.approx([0.5 * 6 * LN(2), 0, -0.5 * 1.5 * LN(2), 0])
    assert [x.item() for x in loss.metrics["kl_teacher"]] == pytest.approx([0, 3], abs=1e-6)
    assert [x.item() for x in loss.metrics["clipped"]] == [0, 3]


def test_sampled_with_a_reward_by_hand() -> None:
    """The same, with advantages 1, 1, -1 of the reward: r = 2 is clipped, r = 1 is not, r = 1/2 is clipped."""
    logprobs_BT = on_grid(probabilities(1 / 2, 1 / 2, 1 / 4)).requires_grad_()
    old, teacher = probabilities(1 / 4, 1 / 2, 1 / 2), probabilities(1 / 4, 1 / 2, 1 / 2)
    batch = batch_of(3, old=old.tolist(), advantages=[1.0, 1.0, -1.0], teacher_logprobs=teacher)
    loss = opd(reward_weight=4.0).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * (2 * LN(2) - LN(2) / 2 + 4 * (-1.2 - 1 + 0.8)))
    assert gradient_of(loss.total, logprobs_BT) == pytest.approx([LN(2), -0.5 * 4, -LN(2) / 4, 0])
    assert loss.clipped_BT is not None and loss.clipped_BT.tolist() == [[True, False, True, False]]
    assert [x.item() for x in loss.metrics["ratio"]] == pytest.approx([3.5, 3])


def test_sequence_masking_looks_at_both_advantages() -> None:
    """A = -ln 2 and ln 2, both r = 1/2, so that mean(log pi_old - log pi) is ln 2 > 0.1: the first is left out."""
    logprobs_BT = on_grid(probabilities(1 / 4, 1 / 4)).requires_grad_()
    old, teacher = probabilities(1 / 2, 1 / 2).tolist(), probabilities(1 / 8, 1 / 2)
    loss = opd(opsm=0.1).loss(batch_of(2, old=old, teacher_logprobs=teacher), Outputs(logprobs_BT))
    assert gradient_of(loss.total, logprobs_BT) == pytest.approx([0, -0.5 * LN(2) / 2, 0])


def test_sampled_is_an_estimate_of_the_full_reverse_divergence() -> None:
    """Over all tokens, each as often as the student says it, both have the same gradient and the same kl_teacher."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    teacher_V = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logprobs_V = logits_V.log_softmax(-1)
    batch = replace(
        batch_of(1),
        mask_BT=torch.ones(6, 1, dtype=torch.bool),
        advantages_BT=torch.zeros(6, 1),
        weight_B=logprobs_V.detach().exp(),
        sequence_B=torch.arange(6),
        columns={"teacher_logprobs": teacher_V[:, None]},
    )
    found = gradient_of(opd().loss(batch, Outputs(logprobs_V[:, None])).total, logits_V)
    expected = gradient_of(distances.reverse(logits_V.log_softmax(-1), teacher_V), logits_V)
    assert max(map(abs, expected)) > 0.05
    assert found == pytest.approx(expected, abs=1e-12)


STUDENT, TEACHER = (1 / 2, 1 / 4, 1 / 8, 1 / 8), (1 / 8, 1 / 8, 1 / 2, 1 / 4)
FULL = {
    "reverse": LN(4) / 2 + LN(2) / 4 + LN(1 / 4) / 8 + LN(1 / 2) / 8,
    "forward": LN(1 / 4) / 8 + LN(1 / 2) / 8 + LN(4) / 2 + LN(2) / 4,
}
TOP2 = {  # the teacher's two likeliest are the last two: student 1/8, 1/8 and 3/4, teacher 1/2, 1/4 and 1/4
    "reverse": LN(1 / 4) / 8 + LN(1 / 2) / 8 + 3 * LN(3) / 4,
    "forward": LN(4) / 2 + LN(2) / 4 + LN(1 / 3) / 4,
}


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_full_by_hand(divergence: str) -> None:
    """Two places: the second's distributions are equal and add nothing. Weights 3 and 0.5."""
    full = on_grid(probabilities(STUDENT, TEACHER)).requires_grad_()
    logprobs_BT = on_grid(probabilities(1 / 2, 1 / 8)).requires_grad_()
    batch = batch_of(2, teacher_full_logprobs=probabilities(TEACHER, TEACHER))
    loss = opd(over="full", divergence=divergence, weight=3.0).loss(batch, Outputs(logprobs_BT, full_logprobs_BTV=full))
    assert loss.total.item() == pytest.approx(0.5 * 3 * FULL[divergence])
    assert [x.item() for x in loss.metrics["divergence"]] == pytest.approx([FULL[divergence], 2])
    assert [x.item() for x in loss.metrics["kl_teacher"]] == pytest.approx([FULL["reverse"], 2])
    expected = torch.tensor(STUDENT) * (1 + (torch.tensor(STUDENT) / torch.tensor(TEACHER)).log())
    if divergence == "forward":
        expected = -torch.tensor(TEACHER)
    gradient = gradient_of(loss.total, full)
    assert gradient[:4] == pytest.approx((0.5 * 3 * expected).tolist())
    assert gradient[8:] == [0, 0, 0, 0]


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_topk_by_hand(divergence: str) -> None:
    topk = on_grid(probabilities(STUDENT[2:])).requires_grad_()
    logprobs_BT = on_grid(probabilities(1 / 2)).requires_grad_()
    batch = batch_of(1, teacher_topk_logprobs=probabilities(TEACHER[2:]), topk_ids=torch.tensor([[2.0, 3.0]]))
    loss = opd(over="topk", divergence=divergence).loss(batch, Outputs(logprobs_BT, topk_logprobs_BTK=topk))
    assert loss.total.item() == pytest.approx(0.5 * TOP2[divergence])
    assert [x.item() for x in loss.metrics["kl_teacher"]] == pytest.approx([TOP2["reverse"], 1])
    assert TOP2["reverse"] < FULL["reverse"]


def test_jsd_by_hand() -> None:
    """Student (1/2, 1/2), teacher (1/4, 3/4), beta 1/4: the mixture is (7/16, 9/16). Default beta: 1/2."""
    quarter = (LN(4 / 7) / 4 + 3 * LN(4 / 3) / 4) / 4 + 3 * (LN(8 / 7) / 2 + LN(8 / 9) / 2) / 4
    half = (LN(2 / 3) / 4 + 3 * LN(6 / 5) / 4) / 2 + (LN(4 / 3) / 2 + LN(4 / 5) / 2) / 2
    full = on_grid(probabilities((1 / 2, 1 / 2)))
    batch = batch_of(1, teacher_full_logprobs=probabilities((1 / 4, 3 / 4)))
    outputs = Outputs(on_grid(probabilities(1 / 2)), full_logprobs_BTV=full)
    for beta, expected in ((0.25, quarter), (None, half)):
        loss = opd(over="full", divergence="jsd", beta=beta).loss(batch, outputs)
        assert loss.total.item() == pytest.approx(0.5 * expected, rel=1e-5)
        reverse = LN(2) / 2 + LN(2 / 3) / 2
        assert loss.metrics["kl_teacher"][0].item() == pytest.approx(reverse, rel=1e-5)


def test_corrections_weigh_the_reward_and_not_the_divergence() -> None:
    """mu half of pi_old, so that rho is 2: with a bound of 1.5 the reward's part counts 1.5 times."""
    logprobs_BT = on_grid(probabilities(1 / 2)).requires_grad_()
    full = on_grid(probabilities((1 / 2, 1 / 2))).requires_grad_()
    batch = batch_of(1, advantages=[1.0], teacher_full_logprobs=probabilities((1 / 4, 3 / 4)))
    batch = replace(batch, logprobs_BT=on_grid(probabilities(1 / 4)))
    settings = {"over": "full", "reward_weight": 1.0, "correction": {"kind": "truncate", "high": 1.5}}
    loss = opd(**settings).loss(batch, Outputs(logprobs_BT, full_logprobs_BTV=full))
    (at_logprobs, at_full) = torch.autograd.grad(loss.total, [logprobs_BT, full])
    assert at_logprobs.flatten().tolist() == pytest.approx([-0.5 * 1.5, 0])
    expected = [0.5 * 0.5 * (LN(2) + 1), 0.5 * 0.5 * (LN(2 / 3) + 1), 0, 0]
    assert at_full.flatten().tolist() == pytest.approx(expected)
