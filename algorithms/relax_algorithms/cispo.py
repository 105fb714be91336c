"""Clipped importance-sampling-weight policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat

from relax_algorithms.options import Options
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

LEAST = -1e9
"""A log-prob below it has no gradient: 0 x infinity would be NaN."""


class Cispo(PolicyGradient):
    """CISPO (arXiv:2506.13585): bounds a token's weight instead of dropping its gradient.

    A = (R - mean) / std over the group. Per token, with r = pi / pi_old and w = clip(r, 1 - clip_low, 1 + clip_high),
    loss = -sg(w) A log pi. No token loses its gradient: those with a bounded weight (w != r) count as ``clipped``, and
    as the metric ``bounded``, which corrections and rejections leave alone; ``weight`` is the mean of w.
    """

    about = About(
        formula="A = (R - mean) / (std + 1e-6); -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi",
        papers=("2506.13585",),
        use="Several updates a step where rare but decisive tokens (however, wait) should go on learning after their "
        "ratio has left the clip.",
        defaults="No lower bound, and token-mean, as in the paper, which tunes the upper bound and does not state it: "
        "0.2 as in PPO; values up to 4 are in use.",
    )

    class Config(Options):
        """Settings of ``cispo``."""

        refuses: ClassVar[Mapping[str, str]] = {
            "dual_clip": "cispo's weight is bounded for advantages of either sign: leave it out, or lower clip_high",
        }

        clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
        """The weight is kept above 1 - clip_low; default: no lower bound."""
        clip_high: PositiveFloat = 0.2
        """The weight is kept below 1 + clip_high."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops
        from relax_algorithms.terms import Terms, composed

        config, terms = self.config, Terms.of(batch, outputs)
        weight_BT = ops.bounded_weight(terms.ratio_BT, config.clip_low, config.clip_high)
        logprobs_BT = ops.masked(outputs.logprobs_BT, terms.mask_BT).clamp(min=LEAST)
        bounded_BT = (weight_BT != terms.ratio_BT.detach()) & (terms.advantages_BT != 0)
        metrics = {
            name: ops.masked_sum(values_BT, terms.mask_BT)
            for name, values_BT in (("weight", weight_BT), ("bounded", bounded_BT))
        }
        return composed(self.config, terms, -weight_BT * terms.advantages_BT * logprobs_BT, bounded_BT, metrics)
