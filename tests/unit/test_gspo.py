"""GSPO: advantages, loss and its gradient by numbers worked out by hand, and by autograd of the paper's formula.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from relax_algorithms import ops
from relax_algorithms.gspo import Gspo
from relax_core.interfaces import Batch, Outputs
from relax_core.testing.algorithm_checks import check_algorithm, example_rows, make_batch, scored_group

NAN = math.nan
LN2 = math.log(2)


def gspo(**settings: Any) -> Gspo:
    return Gspo(Gspo.Config.model_validate(settings))


def by_hand(advantage: float = 1.0) -> tuple[Batch, torch.Tensor]:
    """Log-ratios ln 2 | 2 ln 2, 0 of a trajectory in two rows, whose ratio is 2, and -ln 2 of one of a single token.

    Sequence-mean: the tokens of the first weigh 1/3 each, that of the second 1. The second's advantage is 1 throughout.
    """
    log_ratio_BT = torch.tensor([[LN2, NAN, NAN], [2 * LN2, NAN, 0.0], [-LN2, NAN, NAN]])
    mask_BT = ~log_ratio_BT.isnan()
    old_BT = torch.where(mask_BT, -3.0, NAN)
    batch = Batch(
        step=0,
        tokens_BT=mask_BT.long(),
        mask_BT=mask_BT,
        logprobs_BT=old_BT,
        old_logprobs_BT=old_BT,
        advantages_BT=torch.where(mask_BT, torch.tensor([[advantage], [advantage], [1.0]]), NAN),
        weight_B=torch.tensor([1 / 3, 1 / 3, 1.0]),
        units_B=torch.tensor([1.0, 0.0, 1.0]),
        sequence_B=torch.tensor([0, 0, 1]),
    )
    return batch, (old_BT + log_ratio_BT).requires_grad_()


def gradient_of(total: torch.Tensor, logprobs_BT: torch.Tensor) -> list[list[float]]:
    rows: list[list[float]] = torch.autograd.grad(total, logprobs_BT)[0].tolist()
    return rows


def test_defaults_are_the_papers() -> None:
    config = gspo().config
    assert (config.clip_low, config.clip_high, config.aggregation) == (3e-4, 4e-4, "sequence-mean")


def test_advantages() -> None:
    """Rewards 1 and 0: deviation 0.5, standard deviation sqrt(0.5); a play's tokens weigh 1 / its 2 or 3 tokens."""
    made = gspo().advantages([scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"])])])
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert made["a/0/0"]["advantages"] == pytest.approx([0, half, half])
    assert made["a/1/1"]["advantages"] == pytest.approx([0, -half, 0, -half])
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1 / 2, 1), (1 / 3, 1), (1 / 3, 0), (0, 0)]


def test_loss_within_the_clip() -> None:
    """-(2 x 3 / 3) - 0.5: s is 2 and 0.5. ds / d log pi = s / length: 2/3 at each token of both rows, and 0.5."""
    batch, logprobs_BT = by_hand()
    loss = gspo(clip_low=0.9, clip_high=9.0).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(-2.5)
    rows = [[-2 / 3, 0, 0], [-2 / 3, 0, -2 / 3], [-0.5, 0, 0]]
    assert gradient_of(loss.total, logprobs_BT) == [pytest.approx(row) for row in rows]
    assert [metric.item() for metric in loss.metrics["sequence_ratio"]] == pytest.approx([6.5, 4])
    assert [metric.item() for metric in loss.metrics["ratio"]] == pytest.approx([2 + 4 + 1 + 0.5, 4])
    assert [metric.item() for metric in loss.metrics["clipped"]] == [0, 4]


def test_a_sequence_is_clipped_as_a_whole() -> None:
    """s = 2 with A = 1 is clipped to 1.0004, the token whose own ratio is 1 too; s = 0.5 with A = 1 is pulled back."""
    batch, logprobs_BT = by_hand()
    loss = gspo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(-1.0004 - 0.5)
    assert gradient_of(loss.total, logprobs_BT) == [[0, 0, 0], [0, 0, 0], [pytest.approx(-0.5), 0, 0]]
    assert loss.clipped_BT is not None and loss.clipped_BT.sum(-1).tolist() == [1, 2, 0]
    assert [metric.item() for metric in loss.metrics["clipped"]] == [3, 4]


def test_a_negative_advantage() -> None:
    """s = 2 with A = -1 is pulled back: loss 2, gradient 2/3 at each token; with dual clip 1.5 it is 1.5 and none."""
    batch, logprobs_BT = by_hand(-1.0)
    loss = gspo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(2 - 0.5)
    rows = [[2 / 3, 0, 0], [2 / 3, 0, 2 / 3], [-0.5, 0, 0]]
    assert gradient_of(loss.total, logprobs_BT) == [pytest.approx(row) for row in rows]
    bounded = gspo(dual_clip=1.5).loss(batch, Outputs(logprobs_BT))
    assert bounded.total.item() == pytest.approx(1.5 - 0.5)
    assert gradient_of(bounded.total, logprobs_BT)[0] == [0, 0, 0]


@pytest.mark.parametrize("clip", [(0.5, 0.5), (0.02, 0.05), (3e-4, 4e-4)], ids=str)
def test_it_is_the_papers_objective(clip: tuple[float, float]) -> None:
    """Loss and gradient of -mean over trajectories of min(s A, clip(s) A), s = exp(sum of log r / length), on examples.

    Written per trajectory, without token form, weights or units; one of them has two rows.
    """
    low, high = clip
    algorithm = gspo(clip_low=low, clip_high=high)
    rows = example_rows(algorithm)
    batch = make_batch(rows, garbage=NAN)
    logprobs_BT = make_policy(batch)
    mask_BT = ops.trained(batch)
    terms = []
    for sequence in sorted({*batch.sequence_B[mask_BT.any(-1)].tolist()}):
        here_BT = mask_BT & (batch.sequence_B == sequence)[:, None]
        assert batch.old_logprobs_BT is not None
        log_ratio = logprobs_BT[here_BT] - batch.old_logprobs_BT[here_BT]
        s, advantage = (log_ratio.sum() / len(log_ratio)).exp(), batch.advantages_BT[here_BT][0]
        terms.append(torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage))
    assert len(terms) == 6 and any(here.sum() > 1 for here in (batch.sequence_B == n for n in range(8)))
    written = -torch.stack(terms).mean()
    found = algorithm.loss(batch, Outputs(logprobs_BT)).total / batch.units_B.sum()
    assert found.item() == pytest.approx(written.item(), abs=1e-6)
    expected, gradient = (torch.autograd.grad(total, logprobs_BT)[0] for total in (written, found))
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    assert expected.abs().max() > 1e-3


def make_policy(batch: Batch) -> torch.Tensor:
    """Log-probs whose ratio to the old policy's differs by row and token."""
    assert batch.old_logprobs_BT is not None
    shift_BT = torch.linspace(-0.3, 0.35, batch.mask_BT.numel()).roll(5).reshape(batch.mask_BT.shape)
    return (batch.old_logprobs_BT + shift_BT).requires_grad_()


def test_keeps_the_promises_of_every_algorithm() -> None:
    check_algorithm(gspo())
    check_algorithm(gspo(clip_low=0.3, clip_high=0.3))
