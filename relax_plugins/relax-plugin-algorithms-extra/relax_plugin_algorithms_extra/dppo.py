"""Divergence proximal policy optimisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from relax_algorithms.options import Options
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig

_CLIP = "dppo bounds the difference of probabilities (delta) instead of their ratio: leave it out"


class Dppo(PolicyGradient):
    """DPPO (arXiv:2602.04879), with its binary estimate of the total variation.

    A of GRPO; mu is the policy that sampled, and pi and mu are probabilities of the sampled token. A token is dropped
    when its update would move the policy further away from mu and it already is ``delta`` away: when A > 0 and
    pi - mu > delta, or A < 0 and pi - mu < -delta. The others have loss = -r A with r = pi / mu, cut at ``max_ratio``
    without touching the gradient's direction. Dropped tokens stay in the counts of the aggregation.

    A ratio of 2 at mu = 0.001 is kept, one of 0.8 at mu = 0.9 is not: clipping the ratio does the opposite.
    """

    about = About(
        formula="A of grpo; -min(pi / mu, max_ratio) A; none where A > 0 and pi - mu > delta, or A < 0 and "
        "pi - mu < -delta",
        papers=("2602.04879",),
        use="Large vocabularies, and engines that differ from the trainer: rare tokens learn at full speed, and likely "
        "ones cannot be thrown far.",
        defaults="delta 0.15, the paper's for the total variation; max_ratio 20, as in the authors' code. token-mean "
        "instead of the paper's sum over a play's tokens, for a gradient that does not grow with length.",
    )

    class Config(Options):
        """Settings of ``dppo``."""

        refuses: ClassVar[Mapping[str, str]] = {
            "correction": "the loss of dppo already weighs by pi / mu, and rho would count mu twice: leave it out",
            "clip_low": _CLIP,
            "clip_high": _CLIP,
            "dual_clip": _CLIP,
        }
        delta: Annotated[float, Field(gt=0, lt=1)] = 0.15
        """How far a token's probability may be moved from that with which it was sampled."""
        max_ratio: Annotated[float, Field(gt=1)] = 20.0
        """The ratio pi / mu weighs no more than this."""

    config: Config

    @classmethod
    def notes(cls, config: Any, run: RunConfig) -> Iterable[str]:
        return ()  # its ratio is to the policy that sampled, however old: it needs no correction

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops
        from relax_algorithms.terms import Terms, composed

        terms, config = Terms.of(batch, outputs), self.config
        mask_BT, advantages_BT = terms.mask_BT, terms.advantages_BT
        weight_BT = ops.safe_ratio(outputs.logprobs_BT.detach(), batch.logprobs_BT, mask_BT).clamp(max=config.max_ratio)
        ratio_BT = weight_BT * ops.masked(outputs.logprobs_BT - outputs.logprobs_BT.detach(), mask_BT).exp()
        pi_BT, mu_BT = (ops.masked(p.detach(), mask_BT).exp() for p in (outputs.logprobs_BT, batch.logprobs_BT))
        moved_BT = pi_BT - mu_BT
        dropped_BT = ((advantages_BT > 0) & (moved_BT > config.delta)) | (
            (advantages_BT < 0) & (moved_BT < -config.delta)
        )
        loss_BT = ops.masked(-ratio_BT * advantages_BT, ~dropped_BT)
        return composed(self.config, terms, loss_BT, dropped_BT, {"moved": ops.masked_sum(moved_BT.abs(), mask_BT)})
