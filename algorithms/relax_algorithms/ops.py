"""The formulas of losses and metrics as pure functions on tensors; every algorithm is composed of these.

Legend: B rows of a micro-batch, T tokens of the widest row. A ``mask_BT`` is bool, True at trained tokens; everything
else is float. What stands at other tokens means nothing and may be NaN: functions that take a mask remove it with
``where`` before anything else is computed, so that it reaches neither a value nor a gradient (0 x NaN is NaN).
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_core.interfaces import Batch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides before every exp; beyond it they have no gradient."""


# --- masks and sums ---------------------------------------------------------------------------------------------------


def trained(batch: Batch) -> Tensor:
    """The mask (B, T) of the tokens that the loss counts: the sampled ones of rows whose weight is not 0."""
    return batch.mask_BT & (batch.weight_B != 0)[:, None]


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values (B, T) where the mask is True, 0 elsewhere."""
    return torch.where(mask_BT, values_BT, 0.0)


def aggregate(loss_BT: Tensor, batch: Batch) -> Tensor:
    """Sum over trained tokens of weight x loss, a scalar: the total that ``Algorithm.loss`` returns.

    The weights carry the chosen aggregation (see ``credit.aggregation``); the trainer divides by the units of the whole
    optimizer update, and so the result depends on no padding, micro-batch or rank.
    """
    return masked(loss_BT * batch.weight_B[:, None], trained(batch)).sum()


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """A metric (sum, count) over the masked tokens, two detached float scalars; booleans count as 0 and 1."""
    return masked(values_BT.detach().float(), mask_BT).sum(), mask_BT.sum().float()


def sequence_sum(values_BT: Tensor, mask_BT: Tensor, sequence_B: Tensor) -> Tensor:
    """The sum over the masked tokens of each row's trajectory (B,): rows of one trajectory get the same.

    ``sequence_B``: which trajectory a row is of (see ``Batch``).
    """
    rows_B = masked(values_BT, mask_BT).sum(-1)
    return torch.zeros_like(rows_B).index_add(0, sequence_B, rows_B)[sequence_B]


def sequence_mean(values_BT: Tensor, mask_BT: Tensor, sequence_B: Tensor) -> Tensor:
    """The mean over the masked tokens of each row's trajectory (B,); 0 for one without any."""
    count_B = sequence_sum(mask_BT.to(values_BT.dtype), mask_BT, sequence_B)
    return sequence_sum(values_BT, mask_BT, sequence_B) / count_B.clamp(min=1)


# --- ratios and clipping ----------------------------------------------------------------------------------------------


def log_ratio(logprobs_BT: Tensor, other_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log p - log q (B, T), clamped to [-20, 20]; 0 where masked."""
    return masked(logprobs_BT - other_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def safe_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The importance ratio r = p / p_old (B, T) = exp of the clamped log-ratio; 1 where masked."""
    return log_ratio(logprobs_BT, old_logprobs_BT, mask_BT).exp()


def clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """The clipped policy loss (B, T): -min(r A, clip(r, 1 - low, 1 + high) A). PPO (arXiv:1707.06347).

    Different ``low`` and ``high``: DAPO (arXiv:2503.14476). ``dual`` c > 1 bounds the loss of a negative advantage by
    -c A, which also ends its gradient: dual clip (arXiv:1912.09729).
    """
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if dual is None:
        return loss_BT
    return torch.where(advantages_BT < 0, torch.minimum(loss_BT, -dual * advantages_BT), loss_BT)


def is_clipped(ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """Where ``clipped_surrogate`` has no gradient although the advantage is not 0 (B, T), bool."""
    falls_BT = (advantages_BT < 0) & (ratio_BT < 1 - low)
    rises_BT = (advantages_BT > 0) & (ratio_BT > 1 + high)
    if dual is None:
        return falls_BT | rises_BT
    return falls_BT | rises_BT | ((advantages_BT < 0) & (ratio_BT > dual))


def sequence_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, sequence_B: Tensor) -> Tensor:
    """The ratio s of each token's trajectory (B, T): the geometric mean of r over its masked tokens. GSPO (2507.18071).

    In the token form sg(s) p / sg(p): each token's gradient is s x grad log p. Its mean over the trajectory has the
    gradient of s itself, and advantages may differ by token.
    """
    log_s_B1 = sequence_mean(log_ratio_BT.detach(), mask_BT, sequence_B)[:, None]
    return (log_s_B1 + masked(log_ratio_BT - log_ratio_BT.detach(), mask_BT)).exp()


def soft_gate(ratio_BT: Tensor, advantages_BT: Tensor, positive: float, negative: float) -> Tensor:
    """The gated policy loss (B, T): -(4 / tau) sigmoid(tau (r - 1)) A. SAPO (arXiv:2511.20347).

    tau is ``positive`` where A > 0, else ``negative``. Its gradient is ``soft_gate_weight`` times that of -r A.
    """
    tau_BT = _temperatures(advantages_BT, positive, negative)
    return -4 / tau_BT * (tau_BT * (ratio_BT - 1)).sigmoid() * advantages_BT


def soft_gate_weight(ratio_BT: Tensor, advantages_BT: Tensor, positive: float, negative: float) -> Tensor:
    """4 p (1 - p) with p = sigmoid(tau (r - 1)) (B, T): 1 at r = 1, falling to 0 on both sides. Without gradient."""
    gate_BT = (_temperatures(advantages_BT, positive, negative) * (ratio_BT.detach() - 1)).sigmoid()
    return 4 * gate_BT * (1 - gate_BT)


def _temperatures(advantages_BT: Tensor, positive: float, negative: float) -> Tensor:
    return torch.where(advantages_BT > 0, positive, negative).to(advantages_BT.dtype)


def bounded_weight(ratio_BT: Tensor, low: float | None, high: float) -> Tensor:
    """sg(clip(r, 1 - low, 1 + high)) (B, T), the weight of a token's log-prob; ``low`` None: no lower bound.

    CISPO (arXiv:2506.13585).
    """
    return ratio_BT.detach().clamp(min=None if low is None else 1 - low, max=1 + high)


def entropy_bonus(entropy_BT: Tensor, coefficient: float, mask_BT: Tensor) -> Tensor:
    """The loss term (B, T) that rewards entropy H: -coefficient x H; 0 where masked."""
    return -coefficient * masked(entropy_BT, mask_BT)


# --- Kullback-Leibler divergence --------------------------------------------------------------------------------------
# Estimates of KL(p || q) from tokens sampled by p, with d = log p - log q (Schulman, Approximating KL Divergence, 2020)


def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """d (B, T): unbiased as a value, for rewards. As a loss its expected gradient is zero. 0 where masked."""
    return masked(logprobs_BT - ref_logprobs_BT, mask_BT)


def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """d^2 / 2 (B, T): as a loss its expected gradient is that of the divergence. 0 where masked."""
    return k1(logprobs_BT, ref_logprobs_BT, mask_BT).square() / 2


def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp(-d) - 1 + d (B, T) with d clamped to [-20, 20]: unbiased and never negative. 0 where masked."""
    d_BT = log_ratio(logprobs_BT, ref_logprobs_BT, mask_BT)
    return torch.expm1(-d_BT) + d_BT


# --- values -----------------------------------------------------------------------------------------------------------


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float | None, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """A critic's loss (B, T), and where the clip takes its gradient (bool). PPO's, as in the code of arXiv:1707.06347.

    max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2) / 2: a value that went further than ``clip`` from its
    old one has no gradient while clipping makes it worse, that is when it went towards the return G. ``clip`` None:
    (V - G)^2 / 2. 0 where masked.
    """
    error_BT = masked(values_BT - returns_BT, mask_BT)
    if clip is None:
        return error_BT.square() / 2, torch.zeros_like(mask_BT)
    moved_BT = masked(values_BT - old_values_BT, mask_BT)
    bounded_BT = masked(old_values_BT - returns_BT, mask_BT) + moved_BT.clamp(-clip, clip)
    clipped_BT = (moved_BT.abs() > clip) & (bounded_BT.square() > error_BT.square())
    return torch.where(clipped_BT, bounded_BT, error_BT).square() / 2, clipped_BT
