"""The options of policy gradients by numbers worked out by hand: corrections, rejections, masking, KL, entropy.

All on one micro-batch, see ``by_hand``. Legend: B rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_algorithms import ops
from relax_algorithms.grpo import Grpo
from relax_algorithms.options import Kl
from relax_algorithms.terms import Terms, kl_of
from relax_core.interfaces import Batch, Loss, Member, Outputs, Row, ScoredGroup
from relax_core.types import Task

NAN = math.nan
LN2 = math.log(2)
PER_TOKEN = [4.0, 0.5, 2.0, 0.25]
"""rho of the sampled tokens of ``by_hand``, in reading order."""


def by_hand(log_ratio: float = 0.0) -> tuple[Batch, Tensor]:
    """A trajectory of two rows and one of a single token; every row weighs 1; ``log_ratio`` is log pi - log pi_old.

    === ========== ========== ======== ==
    row trajectory rho        pi_old   A
    === ========== ========== ======== ==
    0   0          4, 1/2, .  1/e, 1/e -1
    1   0          ., 2, .    1/e      -1
    2   1          1/4, ., .  1/e      2
    === ========== ========== ======== ==

    A point is a masked token. Trajectory 0: product 4, geometric mean 4^(1/3) = 1.587. Trajectory 1: both 1/4.
    """
    rho_BT = torch.tensor([[4.0, 0.5, NAN], [NAN, 2.0, NAN], [0.25, NAN, NAN]])
    mask_BT = ~rho_BT.isnan()
    old_BT = torch.where(mask_BT, -1.0, NAN)
    batch = Batch(
        step=0,
        tokens_BT=mask_BT.long(),
        mask_BT=mask_BT,
        logprobs_BT=old_BT - rho_BT.log(),
        old_logprobs_BT=old_BT,
        advantages_BT=torch.where(mask_BT, torch.tensor([[-1.0], [-1.0], [2.0]]), NAN),
        weight_B=torch.ones(3),
        units_B=torch.tensor([2.0, 1.0, 1.0]),
        sequence_B=torch.tensor([0, 0, 1]),
        columns={"ref_logprobs": torch.where(mask_BT, -1.0, NAN)},
    )
    return batch, (old_BT + log_ratio).requires_grad_()


def settled(settings: dict[str, Any], log_ratio: float = 0.0, **changes: Any) -> tuple[Loss, list[float]]:
    """GRPO's loss with these settings, and its gradient at the sampled tokens, in reading order; elsewhere it is 0."""
    batch, logprobs_BT = by_hand(log_ratio)
    batch = replace(batch, **changes)
    loss = Grpo(Grpo.Config.model_validate(settings)).loss(batch, Outputs(logprobs_BT))
    (gradient_BT,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert not gradient_BT[~batch.mask_BT].any()
    gradient: list[float] = gradient_BT[batch.mask_BT].tolist()
    return loss, gradient


def values(loss: Loss, name: str) -> list[float]:
    """A metric's sum and count."""
    return [metric.item() for metric in loss.metrics[name]]


def clipped(loss: Loss) -> list[bool]:
    """At the sampled tokens, in reading order."""
    assert loss.clipped_BT is not None
    batch, _ = by_hand()
    assert not loss.clipped_BT[~batch.mask_BT].any()
    found: list[bool] = loss.clipped_BT[batch.mask_BT].tolist()
    return found


def test_without_options() -> None:
    """On policy each token's gradient is -A, whatever the engine's policy was."""
    loss, gradient = settled({})
    assert gradient == pytest.approx([1, 1, 1, -2])
    assert loss.total.item() == pytest.approx(1 + 1 + 1 - 2)
    assert sorted(loss.metrics) == ["clipped", "kl_old", "ratio"]


# --- corrections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({}, [2, 0.5, 2, 0.25]),  # min(rho, 2)
        ({"high": 3.0}, [3, 0.5, 2, 0.25]),
        ({"kind": "mask"}, [4, 0.5, 2, 0]),  # 0.5 <= rho <= 5: bounds belong to it
        ({"kind": "mask", "low": 0.2, "high": 2.0}, [0, 0.5, 2, 0.25]),
        ({"kind": "decoupled"}, [4, 0.5, 2, 0.25]),
        ({"level": "sequence"}, [2, 2, 2, 0.25]),  # the product of both rows is 4
        ({"level": "sequence", "high": 9.0}, [4, 4, 4, 0.25]),
        ({"kind": "mask", "level": "sequence", "high": 3.9}, [0, 0, 0, 0]),
        ({"kind": "mask", "level": "sequence", "low": 0.1}, [4, 4, 4, 0.25]),
        ({"kind": "decoupled", "level": "sequence"}, [4, 4, 4, 0.25]),
    ],
    ids=str,
)
def test_correction(correction: dict[str, Any], weights: list[float]) -> None:
    """Each token's gradient -A is weighted; a weight of 0 counts as clipped; the mean weight is logged."""
    loss, gradient = settled({"correction": correction})
    assert gradient == pytest.approx([weights[0], weights[1], weights[2], -2 * weights[3]])
    assert loss.total.item() == pytest.approx(sum(gradient))
    assert values(loss, "correction") == pytest.approx([sum(weights), 4])
    assert clipped(loss) == [weight == 0 for weight in weights]


def test_decoupled_is_weight_times_the_clipped_loss() -> None:
    """-sg(pi_old / mu) min(u A, clip(u) A) with u = pi / pi_old = 2: A = 2 is clipped at 1.2, A = -1 is not."""
    loss, gradient = settled({"correction": {"kind": "decoupled"}}, LN2)
    assert gradient == pytest.approx([4 * 2, 0.5 * 2, 2 * 2, 0])
    assert loss.total.item() == pytest.approx(8 + 1 + 4 - 0.25 * 1.2 * 2)
    assert clipped(loss) == [False, False, False, True]


def test_a_product_is_clamped_like_any_log_ratio() -> None:
    """log rho 15 twice: the product is e^20, not e^30; the sum of a trajectory is clamped, not only each token."""
    batch, _ = by_hand()
    far_BT = torch.where(batch.mask_BT, -16.0, NAN)
    loss, gradient = settled({"correction": {"kind": "decoupled", "level": "sequence"}}, logprobs_BT=far_BT)
    assert gradient == pytest.approx([math.exp(20)] * 3 + [-2 * math.exp(15)])
    assert math.isfinite(loss.total.item())


def test_where_the_engine_is_the_old_policy_nothing_is_weighted() -> None:
    """As under ``old: engine``: rho is 1, and the ratio alone corrects."""
    batch, _ = by_hand()
    for kind in ("truncate", "mask", "decoupled"):
        loss, gradient = settled({"correction": {"kind": kind}}, logprobs_BT=batch.old_logprobs_BT)
        assert gradient == pytest.approx([1, 1, 1, -2])
        assert values(loss, "correction") == [4, 4]


# --- rejection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rejection", "kept"),  # which trajectories
    [
        ({"low": 0.1, "high": 1.6}, [True, True]),  # 4^(1/3) = 1.587
        ({"low": 0.1, "high": 1.5}, [False, True]),
        ({"low": 0.3, "high": 1.6}, [True, False]),
        ({"by": "product", "low": 0.1, "high": 4.1}, [True, True]),
        ({"by": "product", "low": 0.1, "high": 3.9}, [False, True]),  # either of its rows alone is below 2.1
        ({"by": "product", "low": 0.3, "high": 3.9}, [False, False]),
    ],
    ids=str,
)
def test_rejection(rejection: dict[str, Any], kept: list[bool]) -> None:
    """All rows of a rejected trajectory lose their gradient; they stay in the counts."""
    loss, gradient = settled({"rejection": rejection})
    assert gradient == pytest.approx([1.0 * kept[0]] * 3 + [-2.0 * kept[1]])
    assert loss.total.item() == pytest.approx(3 * kept[0] - 2 * kept[1])
    rejected = [not kept[0]] * 3 + [not kept[1]]
    assert clipped(loss) == rejected
    assert values(loss, "rejected") == [sum(rejected), 4]


def test_what_is_rejected_is_still_held_near_the_reference() -> None:
    """Rejection concerns the policy's loss: the KL of k2 with d = ln 2 goes on with gradient 0.1 x ln 2."""
    settings = {"rejection": {"by": "product", "low": 0.3, "high": 3.9}, "kl": {"coefficient": 0.1, "estimator": "k2"}}
    _, gradient = settled(settings, LN2)
    assert gradient == pytest.approx([0.1 * LN2] * 4)


# --- off-policy sequence masking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "shift", "masked"),
    [(0.1, 0.0, False), (0.1, 0.5, True), (0.49, 0.5, True), (0.51, 0.5, False), (0.1, -0.5, False)],
)
def test_opsm(limit: float, shift: float, masked: bool) -> None:
    """log pi_old - log pi is ``shift`` at each token: trajectory 0, with A = -1, is masked once that exceeds the limit.

    Trajectory 1 has A = 2 and never is. With wide clips, gradients are -r A.
    """
    loss, gradient = settled({"opsm": limit, "clip_low": 1.0, "clip_high": 9.0}, -shift)
    ratio = math.exp(-shift)
    assert gradient == pytest.approx([0 if masked else ratio] * 3 + [-2 * ratio])
    assert clipped(loss) == [masked] * 3 + [False]
    assert values(loss, "opsm") == [3 * masked, 4]


def test_opsm_means_over_all_rows_of_a_trajectory() -> None:
    """0.9, 0 | 0: the mean is 0.3 over the trajectory, though 0.45 over its first row and 0 over its second."""
    batch, _ = by_hand()
    logprobs_BT = torch.tensor([[-1.9, -1.0, NAN], [NAN, -1.0, NAN], [-1.0, NAN, NAN]], requires_grad=True)
    for limit, masked in ((0.29, True), (0.31, False)):
        loss = Grpo(Grpo.Config(opsm=limit, clip_low=1.0)).loss(batch, Outputs(logprobs_BT))
        assert clipped(loss) == [masked] * 3 + [False]


# --- KL and entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "value", "slope"),  # of a token with d = log pi - log ref = ln 2 and ratio 2
    [
        ({"estimator": "k2"}, LN2**2 / 2, LN2),
        ({"estimator": "k3"}, 0.5 - 1 + LN2, 1 - 0.5),
        ({}, 0.5 - 1 + LN2, 1 - 0.5),  # k3 is the default
        ({"estimator": "k2", "unbiased": True}, LN2**2, 2 * LN2),  # r k2, sg(r) d
        ({"estimator": "k3", "unbiased": True}, 2 * LN2 - 1, 2 * LN2),  # r k3, r (1 - 1/2 + k3) = r d
    ],
    ids=str,
)
def test_kl_in_the_loss(kl: dict[str, Any], value: float, slope: float) -> None:
    """Added to each token's loss, times its coefficient. The policy's part: r A = 2 with A = -1; clipped with A = 2."""
    loss, gradient = settled({"kl": {"coefficient": 0.1, **kl}}, LN2)
    assert loss.total.item() == pytest.approx(2 + 2 + 2 - 1.2 * 2 + 4 * 0.1 * value)
    assert gradient == pytest.approx([2 + 0.1 * slope] * 3 + [0.1 * slope])
    assert values(loss, "kl_ref") == pytest.approx([4 * value, 4])
    assert clipped(loss) == [False, False, False, True]  # the KL is no part of that


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_unbiased_kl_far_from_the_reference(kind: Any) -> None:
    """Where exp(-d) is huge, d = -18 and -25, the gradient is still r d; the ratio here is 1."""
    mask_BT, zeros_BT = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    logprobs_BT = torch.tensor([[-19.0, -26.0]], requires_grad=True)
    batch = Batch(
        0, mask_BT.long(), mask_BT, zeros_BT, None, zeros_BT, torch.ones(1), torch.ones(1),
        torch.zeros(1, dtype=torch.long), {"ref_logprobs": torch.full((1, 2), -1.0)},
    )  # fmt: skip
    kl = Kl(coefficient=1.0, estimator=kind, unbiased=True)
    (gradient,) = torch.autograd.grad(kl_of(kl, Terms.of(batch, Outputs(logprobs_BT))).sum(), logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([-18, -25])


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_unbiased_kl_has_the_gradient_of_the_divergence(kind: Any) -> None:
    """Over tokens of another policy, its expected gradient is that of KL(pi || ref); without the ratio it is not."""
    reference, old = torch.tensor([0.5, -1.0, 0.25]).log_softmax(-1), torch.tensor([1.0, 0.2, -0.5]).log_softmax(-1)
    logits = torch.tensor([-0.5, 0.75, 0.0], requires_grad=True)
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    found = {}
    for unbiased in (True, False):
        mask_BT, zeros_BT = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3)
        batch = Batch(
            0, mask_BT.long(), mask_BT, old[None], old[None], zeros_BT, torch.ones(1), torch.ones(1),
            torch.zeros(1, dtype=torch.long), {"ref_logprobs": reference[None]},
        )  # fmt: skip
        kl = Kl(coefficient=1.0, estimator=kind, unbiased=unbiased)
        mean = (old.exp() * kl_of(kl, Terms.of(batch, Outputs(policy[None])))[0]).sum()
        (found[unbiased],) = torch.autograd.grad(mean, logits, retain_graph=True)
    torch.testing.assert_close(found[True], expected)
    assert (found[False] - expected).abs().max() > 0.01


def test_kl_in_the_reward() -> None:
    """The sum of log mu - log ref over all sampled tokens of a play, 0.5 x (1 + 2 | 1) = 2, is taken from its reward.

    Rewards 5 - 2 and 1 - 0 remain, less their mean: 1 and -1, over the deviation sqrt(2). The loss has no KL then.
    """
    import numpy as np

    def row(id: str, kl: list[float], mask: list[int]) -> Row:
        reference = np.full(len(kl), -3.0, np.float32)
        columns = {"mask": np.array(mask), "ref_logprobs": reference, "logprobs": reference + np.array(kl, np.float32)}
        return Row(id, "a", columns)

    members = [
        Member(5.0, {}, [row("a/0/0", [1.0, 9.0, 2.0], [1, 0, 1]), row("a/0/1", [NAN, 1.0], [0, 1])]),
        Member(1.0, {}, [row("a/1/0", [0.0], [1])]),
        Member(None, {}, [row("a/2/0", [7.0], [1])]),
    ]
    algorithm = Grpo(Grpo.Config(kl=Kl(place="reward", coefficient=0.5)))
    assert algorithm.rewards(ScoredGroup("a", Task("a", ()), members)) == [3.0, 1.0, None]
    made = algorithm.advantages([ScoredGroup("a", Task("a", ()), members)])
    high = 1 / (math.sqrt(2) + 1e-6)
    assert made["a/0/0"]["advantages"] == pytest.approx([high, 0, high])
    assert made["a/1/0"]["advantages"] == pytest.approx([-high])
    loss, gradient = settled({"kl": {"place": "reward", "coefficient": 0.5}}, LN2)
    assert gradient == pytest.approx([2, 2, 2, 0])
    assert values(loss, "kl_ref") == pytest.approx([4 * LN2, 4])  # k1, of which the run reports


def test_entropy() -> None:
    """At step 5 of 10 from 0.2 to 0.1 the coefficient is 0.15; entropies 1, 2, 3, 4 sum to 10."""
    batch, logprobs_BT = by_hand()
    entropy_BT = torch.full(batch.mask_BT.shape, NAN)
    entropy_BT[batch.mask_BT] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    algorithm = Grpo(Grpo.Config.model_validate({"entropy": {"start": 0.2, "end": 0.1, "steps": 10}}))
    loss = algorithm.loss(replace(batch, step=5), Outputs(logprobs_BT, entropy_BT.requires_grad_()))
    assert loss.total.item() == pytest.approx(1 - 0.15 * 10)
    gradient_BT = torch.autograd.grad(loss.total, entropy_BT)[0]
    assert gradient_BT[batch.mask_BT].tolist() == pytest.approx([-0.15] * 4)
    assert values(loss, "entropy") == [10, 4]


# --- together ---------------------------------------------------------------------------------------------------------


def test_options_together() -> None:
    """Weights 2, 1/2, 2, 1/4, trajectory 1 rejected, k2 with d = 0.1 and coefficient 1; r = e^0.1 is not clipped."""
    settings = {
        "correction": {"kind": "truncate"},
        "rejection": {"low": 0.3, "high": 1.6},
        "kl": {"coefficient": 1.0, "estimator": "k2"},
    }
    loss, gradient = settled(settings, 0.1)
    r = math.exp(0.1)
    assert gradient == pytest.approx([2 * r + 0.1, 0.5 * r + 0.1, 2 * r + 0.1, 0.1])
    assert loss.total.item() == pytest.approx(4.5 * r + 4 * 0.1**2 / 2)
    assert clipped(loss) == [False, False, False, True]


def test_untrained_rows_are_in_no_sequence_and_no_metric() -> None:
    """Row 1 without a share: trajectory 0 is row 0 alone, whose product is 2."""
    weight_B = torch.tensor([1.0, 0.0, 1.0])
    loss, gradient = settled({"correction": {"kind": "decoupled", "level": "sequence"}}, weight_B=weight_B)
    assert gradient == pytest.approx([2, 2, 0, -0.5])
    assert values(loss, "correction") == pytest.approx([2 + 2 + 0.25, 3])


def test_sequences() -> None:
    """Sums 4 + 1/2 + 2 and 1/4, means over 3 tokens and 1: the same for both rows of a trajectory."""
    batch, logprobs_BT = by_hand()
    terms = Terms.of(batch, Outputs(logprobs_BT))
    rho_BT = torch.full(batch.mask_BT.shape, NAN)
    rho_BT[batch.mask_BT] = torch.tensor(PER_TOKEN)
    assert terms.sequence_sum(rho_BT)[:, 0].tolist() == [6.5, 6.5, 0.25]
    assert terms.sequence_mean(rho_BT)[:, 0].tolist() == pytest.approx([6.5 / 3, 6.5 / 3, 0.25])
    none_BT = torch.zeros_like(batch.mask_BT)
    assert ops.sequence_mean(rho_BT, none_BT, batch.sequence_B).tolist() == [0, 0, 0]
