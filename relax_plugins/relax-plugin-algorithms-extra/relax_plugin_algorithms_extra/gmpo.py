"""Geometric-mean policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import PositiveFloat

from relax_algorithms.credit import Aggregation
from relax_algorithms.options import Options
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

_CLIP = "gmpo clips the log of the ratio: set log_clip_low and log_clip_high (0.4: ratios from e^-0.4 to e^0.4)"


class Gmpo(PolicyGradient):
    """GMPO (arXiv:2507.20673): the geometric mean of a play's token ratios in place of GRPO's arithmetic one.

    A of GRPO; with r = pi / pi_old, c = min(log r, log_clip_high) where A > 0 and max(log r, -log_clip_low) where
    A < 0: each token is clipped before the mean, on the side to which A pushes it. g = exp(mean of c over all sampled
    tokens of the play, of all its rows), and a play's objective is g A.

    Its gradient gives each token that is not clipped -g A / n, n being the play's tokens. As a loss per token, which
    the aggregations weigh: -sg(g) A exp(c - sg(c)). Under ``sequence-mean`` value and gradient are exactly the paper's;
    under others each token's gradient keeps the factor g and is weighted as they say.
    """

    about = About(
        formula="A of grpo; c = log r clipped to log_clip_high (A > 0) or -log_clip_low (A < 0); -exp(mean of c over "
        "the play) A, its gradient spread over the play's tokens",
        papers=("2507.20673",),
        use="Long plays, or several updates a step, where single tokens with extreme ratios shake grpo.",
        defaults="Clip at e^-0.4 and e^0.4, the paper's: wider than grpo's, since the mean tames outliers. "
        "sequence-mean, which is the paper's objective.",
    )

    class Config(Options):
        """Settings of ``gmpo``."""

        refuses: ClassVar[Mapping[str, str]] = {
            "clip_low": _CLIP,
            "clip_high": _CLIP,
            "dual_clip": "gmpo bounds what outliers weigh by its mean: leave it out",
        }
        aggregation: Aggregation = "sequence-mean"
        """How token losses become one number; ``sequence-mean`` is the paper's objective."""
        log_clip_low: PositiveFloat = 0.4
        """A token's log-ratio is kept above -log_clip_low where the advantage is negative."""
        log_clip_high: PositiveFloat = 0.4
        """A token's log-ratio is kept below log_clip_high where the advantage is positive."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        import torch

        from relax_algorithms.terms import Terms, composed

        config, terms = self.config, Terms.of(batch, outputs)
        log_ratio_BT, advantages_BT = terms.log_ratio_BT, terms.advantages_BT
        rising_BT = log_ratio_BT.clamp(max=config.log_clip_high)
        falling_BT = log_ratio_BT.clamp(min=-config.log_clip_low)
        kept_BT = torch.where(advantages_BT > 0, rising_BT, falling_BT)
        clipped_BT = (advantages_BT != 0) & (kept_BT != log_ratio_BT)
        mean_B1 = terms.sequence_mean(kept_BT.detach()).exp()
        loss_BT = -mean_B1 * advantages_BT * (kept_BT - kept_BT.detach()).exp()
        return composed(self.config, terms, loss_BT, clipped_BT)
