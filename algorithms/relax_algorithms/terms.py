"""A micro-batch as policy losses see it, and the loss composed of token losses and of what the options add.

Legend: B rows of a micro-batch, T tokens of the widest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_algorithms import ops
from relax_algorithms.options import Clipped, Correction, Kl, Options, Rejection
from relax_core.interfaces import Batch, Loss, Outputs

Metrics = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Terms:
    """What every policy loss is made of, all (B, T), with neutral values (log-ratio 0, advantage 0) where masked."""

    batch: Batch
    outputs: Outputs
    mask_BT: Tensor
    """bool: the tokens that count."""
    old_BT: Tensor
    """log pi_old. Where the batch brings none it is the policy being trained: then the ratio is 1."""
    log_ratio_BT: Tensor
    """log pi - log pi_old, clamped to [-20, 20]; with gradient."""
    ratio_BT: Tensor
    """r = pi / pi_old; with gradient."""
    advantages_BT: Tensor

    @classmethod
    def of(cls, batch: Batch, outputs: Outputs) -> Terms:
        mask_BT = ops.trained(batch)
        old_BT = outputs.logprobs_BT.detach() if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        log_ratio_BT = ops.log_ratio(outputs.logprobs_BT, old_BT, mask_BT)
        advantages_BT = ops.masked(batch.advantages_BT, mask_BT)
        return cls(batch, outputs, mask_BT, old_BT, log_ratio_BT, log_ratio_BT.exp(), advantages_BT)

    def sequence_sum(self, values_BT: Tensor) -> Tensor:
        """(B, 1): the sum over the counted tokens of the row's whole trajectory."""
        return ops.sequence_sum(values_BT, self.mask_BT, self.batch.sequence_B)[:, None]

    def sequence_mean(self, values_BT: Tensor) -> Tensor:
        """(B, 1): the mean over the counted tokens of the row's whole trajectory; 0 where it has none."""
        return ops.sequence_mean(values_BT, self.mask_BT, self.batch.sequence_B)[:, None]


def clipped(options: Clipped, terms: Terms, ratio_BT: Tensor | None = None, metrics: Metrics | None = None) -> Loss:
    """``composed`` of PPO's clipped surrogate. ``ratio_BT``: in place of the tokens' own ratios."""
    ratio_BT = terms.ratio_BT if ratio_BT is None else ratio_BT
    bounds = (options.clip_low, options.clip_high, options.dual_clip)
    loss_BT = ops.clipped_surrogate(ratio_BT, terms.advantages_BT, *bounds)
    clipped_BT = ops.is_clipped(ratio_BT, terms.advantages_BT, *bounds)
    return composed(options, terms, loss_BT, clipped_BT, metrics)


def composed(
    options: Options, terms: Terms, loss_BT: Tensor, clipped_BT: Tensor, metrics: Metrics | None = None
) -> Loss:
    """Token losses of the policy, weighted by corrections, with KL and entropy terms added, then aggregated.

    ``clipped_BT``: tokens from which the loss takes the gradient. What is rejected counts as clipped, and stays in the
    counts of the aggregation: it weighs 0.
    """
    mask_BT, found = terms.mask_BT, dict(metrics or {})
    found["ratio"] = ops.masked_sum(terms.ratio_BT, mask_BT)
    found["kl_old"] = ops.masked_sum(ops.k3(terms.old_BT, terms.outputs.logprobs_BT.detach(), mask_BT), mask_BT)
    if options.correction is not None:
        weight_BT = correction_weights(options.correction, terms)
        loss_BT, clipped_BT = loss_BT * weight_BT, clipped_BT | (weight_BT == 0)
        found["correction"] = ops.masked_sum(weight_BT, mask_BT)
    if options.rejection is not None:
        rejected_BT = rejected(options.rejection, terms)
        loss_BT, clipped_BT = torch.where(rejected_BT, 0.0, loss_BT), clipped_BT | rejected_BT
        found["rejected"] = ops.masked_sum(rejected_BT, mask_BT)
    if options.opsm is not None:
        off_BT = (terms.advantages_BT < 0) & (terms.sequence_mean(-terms.log_ratio_BT.detach()) > options.opsm)
        loss_BT, clipped_BT = torch.where(off_BT, 0.0, loss_BT), clipped_BT | off_BT
        found["opsm"] = ops.masked_sum(off_BT, mask_BT)
    if options.kl is not None:
        divergence_BT = kl_of(options.kl, terms)
        found["kl_ref"] = ops.masked_sum(divergence_BT, mask_BT)
        if options.kl.place == "loss":
            loss_BT = loss_BT + options.kl.coefficient * divergence_BT
    if options.entropy is not None:
        entropy_BT = terms.outputs.entropy_BT
        assert entropy_BT is not None  # named in the outputs
        loss_BT = loss_BT + ops.entropy_bonus(entropy_BT, options.entropy.at(terms.batch.step), mask_BT)
        found["entropy"] = ops.masked_sum(entropy_BT, mask_BT)
    clipped_BT = clipped_BT & mask_BT
    found["clipped"] = ops.masked_sum(clipped_BT, mask_BT)
    return Loss(ops.aggregate(loss_BT, terms.batch), found, clipped_BT)


def correction_weights(correction: Correction, terms: Terms) -> Tensor:
    """Importance weights (B, T) of rho = pi_old / mu, without gradient: truncated, masked, or as they are.

    The log of a trajectory's product is clamped to [-20, 20] like every log-ratio.
    """
    log_rho_BT = _log_rho(terms)
    if correction.level == "sequence":
        limit = ops.MAX_LOG_RATIO
        log_rho_BT = terms.sequence_sum(log_rho_BT).clamp(-limit, limit).expand_as(log_rho_BT)
    rho_BT = log_rho_BT.exp()
    low, high = correction.bounds
    match correction.kind:
        case "truncate":
            return rho_BT.clamp(max=high)
        case "mask":
            return torch.where((rho_BT >= low) & (rho_BT <= high), rho_BT, 0.0)
        case "decoupled":
            return rho_BT


def rejected(rejection: Rejection, terms: Terms) -> Tensor:
    """The tokens (B, T), bool, of trajectories whose rho lies outside the bounds (arXiv:2512.23075)."""
    total = terms.sequence_mean if rejection.by == "geometric-mean" else terms.sequence_sum
    limit = ops.MAX_LOG_RATIO
    rho_B1 = total(_log_rho(terms)).clamp(-limit, limit).exp()
    return ((rho_B1 < rejection.low) | (rho_B1 > rejection.high)) & terms.mask_BT


def _log_rho(terms: Terms) -> Tensor:
    return ops.log_ratio(terms.old_BT, terms.batch.logprobs_BT, terms.mask_BT).detach()


def kl_of(kl: Kl, terms: Terms) -> Tensor:
    """The divergence from the reference (B, T), by the chosen estimate; with gradient.

    ``unbiased``: times r, so that its expected gradient over tokens of pi_old is that of KL(pi || ref): r d grad log pi
    at each token. k2 has it when r is a mere weight. r k3 has it too, but as the difference of terms that grow like
    exp(-d): so k3 gives the value and k2 the gradient.
    """
    estimate = {"k1": ops.k1, "k2": ops.k2, "k3": ops.k3}[kl.kind]
    policies = (terms.outputs.logprobs_BT, terms.batch.columns["ref_logprobs"], terms.mask_BT)
    if not kl.unbiased:
        return estimate(*policies)
    half_square_BT = ops.k2(*policies)
    slope_BT = half_square_BT - half_square_BT.detach()
    return terms.ratio_BT.detach() * (estimate(*policies).detach() + slope_BT)
