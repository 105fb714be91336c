"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import model_validator

from relax_algorithms import credit
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup


class Rloo(PolicyGradient):
    """RLOO (arXiv:2402.14740): a play's advantage is its reward less the mean of the other plays of the same task.

    A = R - mean of the others, an unbiased baseline. Per token, with r = pi / pi_old, loss = -r A, by default clipped:
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    """

    about = About(
        formula="A = R - mean of the others; -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with clip: false -r A",
        papers=("2402.14740",),
        use="Plain REINFORCE with an unbiased baseline; rewards whose scale means something and must stay.",
        defaults="Clip 0.2 on both sides, where the paper has none: nothing changes on policy, and several updates a "
        "step stay safe. token-mean, where the paper sums over a play (sequence-sum): the gradient then does not grow "
        "with the length.",
    )

    class Config(Clipped):
        """Settings of ``rloo``."""

        clip: bool = True
        """Whether the ratio is clipped; without, the loss is the importance-weighted policy gradient -r A."""

        @model_validator(mode="after")
        def _bounds_where_clipped(self) -> Self:
            fields = type(self).model_fields  # compared with defaults: a resolved run file writes them out
            found = [n for n in ("clip_low", "clip_high", "dual_clip") if getattr(self, n) != fields[n].default]
            if found and not self.clip:
                raise ValueError(f"{found[0]}: clip is false and so nothing is clipped: leave out {found[0]}, or clip")
            return self

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        advantages = [credit.leave_one_out(self.rewards(group)) for group in groups]
        return self.credited(groups, credit.spread(groups, advantages))

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        import torch

        from relax_algorithms.terms import Terms, clipped, composed

        terms = Terms.of(batch, outputs)
        if self.config.clip:
            return clipped(self.config, terms)
        return composed(self.config, terms, -terms.ratio_BT * terms.advantages_BT, torch.zeros_like(terms.mask_BT))
