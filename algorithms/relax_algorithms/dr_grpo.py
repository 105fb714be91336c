"""GRPO done right: without its two biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_algorithms.credit import Aggregation
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup


class DrGrpo(PolicyGradient):
    """Dr. GRPO (arXiv:2503.20783): GRPO without the division by the deviation and without the one by the length.

    A = R - mean over the group. Per token, with r = pi / pi_old, loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high)
    A); a play's token losses are summed and divided by a constant, the same for all plays.
    """

    about = About(
        formula="A = R - mean; -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), summed over a play, / constant",
        papers=("2503.20783",),
        use="Where GRPO makes wrong answers longer and longer, or tasks that nearly always or nearly never succeed "
        "should not weigh as much as the others.",
        defaults="aggregation constant, as in the paper; its constant has no default and must be set to the response "
        "limit, the most tokens that a play may sample. Clip 0.2 on both sides, as in PPO.",
    )

    class Config(Clipped):
        """Settings of ``dr-grpo``; ``constant`` must be set unless ``aggregation`` is another."""

        aggregation: Aggregation = "constant"
        """How token losses become one number."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups, "none")

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        return clipped(self.config, Terms.of(batch, outputs))
