"""Group sequence policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, PositiveFloat

from relax_algorithms.credit import Aggregation
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup


class Gspo(PolicyGradient):
    """GSPO (arXiv:2507.18071): one ratio for a whole sequence, and so one clip for all of its tokens.

    A = (R - mean) / std over the group. With r = pi / pi_old, s = exp(mean of log r over the trajectory's tokens, of
    all its rows), and in place of r the token's s_t = sg(s) pi / sg(pi), whose value is s:
    loss = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A). Averaged over the sequence this has the gradient of
    the paper's -min(s A, clip(s) A), since that of s is s / length x the sum of the tokens' grad log pi.
    """

    about = About(
        formula="A = (R - mean) / (std + 1e-6); s = exp(mean over the sequence of log r), s_t = sg(s) pi / sg(pi); "
        "-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)",
        papers=("2507.18071",),
        use="Mixture-of-experts models and long answers, where single tokens' ratios are noise that grows with the "
        "length; several updates a step.",
        defaults="Clip 3e-4 below and 4e-4 above, and sequence-mean, as in the paper: a mean of many log-ratios moves "
        "far less than one ratio. Other aggregations weigh the tokens of unequal sequences otherwise.",
    )

    class Config(Clipped):
        """Settings of ``gspo``."""

        aggregation: Aggregation = "sequence-mean"
        """How token losses become one number."""
        clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
        """The sequence's ratio is kept above 1 - clip_low."""
        clip_high: PositiveFloat = 4e-4
        """The sequence's ratio is kept below 1 + clip_high."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops
        from relax_algorithms.terms import Terms, clipped

        terms = Terms.of(batch, outputs)
        s_BT = ops.sequence_ratio(terms.log_ratio_BT, terms.mask_BT, batch.sequence_B)
        return clipped(self.config, terms, s_BT, {"sequence_ratio": ops.masked_sum(s_BT, terms.mask_BT)})
