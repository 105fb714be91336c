"""Group-relative policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup


class Grpo(PolicyGradient):
    """GRPO (arXiv:2402.03300): a play's advantage is its reward compared with those of the same task.

    A = (R - mean) / std over the group, the same for all tokens of a play. Per token, with r = pi / pi_old,
    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    """

    about = About(
        formula="A = (R - mean) / (std + 1e-6); -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        papers=("2402.03300",),
        use="The first choice for tasks whose answers can be checked: no critic, few settings.",
        defaults="Clip 0.2 on both sides, as in PPO. token-mean instead of the paper's sequence-mean: that one gives "
        "each token of a long wrong answer less weight, and so makes wrong answers longer.",
    )

    class Config(Clipped):
        """Settings of ``grpo``."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        return clipped(self.config, Terms.of(batch, outputs))
