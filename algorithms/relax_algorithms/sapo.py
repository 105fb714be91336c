"""Soft adaptive policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import PositiveFloat

from relax_algorithms.credit import Aggregation
from relax_algorithms.options import Options
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

SOFT_CLIPPED = 0.9
"""A token whose gradient the gate weighs less than this counts as clipped: with tau 1, r below 0.345 or above 1.655."""


class Sapo(PolicyGradient):
    """SAPO (arXiv:2511.20347): a soft gate instead of a clip; the further the ratio from 1, the smaller the gradient.

    A = (R - mean) / std over the group. Per token, with r = pi / pi_old, loss = -(4 / tau) sigmoid(tau (r - 1)) A, tau
    being ``tau_pos`` where A > 0 and else ``tau_neg``. Its gradient is w r A grad log pi with w = 4 p (1 - p) and
    p = sigmoid(tau (r - 1)): exactly 1 at r = 1. Tokens with w < 0.9 count as ``clipped`` (softly: some gradient
    stays); the metric ``gate`` is the mean of w.
    """

    about = About(
        formula="A = (R - mean) / (std + 1e-6); -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos if A > 0 else tau_neg",
        papers=("2511.20347",),
        use="Several updates a step, or stale samples, where a hard clip either throws away whole answers or lets "
        "single tokens run off.",
        defaults="tau_pos 1.0, tau_neg 1.05 and sequence-mean, as in the paper: pushing a token down raises all others "
        "a little and is the less stable side, so its gradient fades sooner.",
    )

    class Config(Options):
        """Settings of ``sapo``."""

        refuses: ClassVar[Mapping[str, str]] = {
            "clip_low": "sapo clips nothing, its gate fades instead: set tau_neg and tau_pos",
            "clip_high": "sapo clips nothing, its gate fades instead: set tau_neg and tau_pos",
            "dual_clip": "sapo's gate bounds the loss of a negative advantage already: leave it out, or raise tau_neg",
        }

        aggregation: Aggregation = "sequence-mean"
        """How token losses become one number."""
        tau_pos: PositiveFloat = 1.0
        """How fast the gradient of a positive advantage fades as the ratio leaves 1."""
        tau_neg: PositiveFloat = 1.05
        """Likewise for a negative advantage."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops
        from relax_algorithms.terms import Terms, composed

        config, terms = self.config, Terms.of(batch, outputs)
        gate = (terms.ratio_BT, terms.advantages_BT, config.tau_pos, config.tau_neg)
        loss_BT, weight_BT = ops.soft_gate(*gate), ops.soft_gate_weight(*gate)
        clipped_BT = (weight_BT < SOFT_CLIPPED) & (terms.advantages_BT != 0)
        return composed(self.config, terms, loss_BT, clipped_BT, {"gate": ops.masked_sum(weight_BT, terms.mask_BT)})
