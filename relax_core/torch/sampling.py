"""Draws one token a row by inverse CDF from a keyed uniform: the same number gives the same token in any batch.

A token's log-prob is that of the tempered distribution without banned tokens over the *whole* vocabulary, in float32:
what the trainer computes too. For greedy rows it is the one at temperature 1; for rows with top-k or top-p (evaluations
only) the tokens are drawn from the kept set, but the log-prob is still that of the full distribution.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BANNED = -1e9
"""Logit of a token that must not be sampled: finite, so that a difference of log-probs never becomes NaN."""

_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Elements of (rows, V) that are turned into probabilities at once: bounds the memory that a big vocabulary takes."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How each of N rows draws. None: no row differs from temperature 1, not greedy, everything kept."""

    temperature_N1: Tensor | None = None
    """Greedy rows hold 1."""
    greedy_N: Tensor | None = None
    top_k_N1: Tensor | None = None
    """Most probable tokens that are kept; rows that keep all hold the vocabulary's size."""
    top_p_N1: Tensor | None = None
    """Of what top-k kept, the smallest set of most probable tokens with at least this share is kept."""

    @classmethod
    def of(
        cls,
        temperature_N: NDArray[np.float32],
        top_k_N: NDArray[np.int64],
        top_p_N: NDArray[np.float64],
        device: torch.device,
    ) -> Rules:
        """From the numbers of the requests: temperature 0 is greedy, top_k 0 keeps all."""
        greedy_N = temperature_N == 0
        heat_N = np.where(greedy_N, np.float32(1), temperature_N)
        kept_N = np.where(top_k_N > 0, top_k_N, np.iinfo(np.int64).max)
        cut = bool((top_k_N > 0).any() or (top_p_N < 1).any())

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values.copy()).to(device)[:, None]

        return cls(
            column(heat_N) if (heat_N != 1).any() else None,
            column(greedy_N)[:, 0] if greedy_N.any() else None,
            column(kept_N) if cut else None,
            column(top_p_N) if cut else None,
        )

    def rows(self, chunk: slice) -> Rules:
        """The rules of some of the rows."""
        parts = (self.temperature_N1, self.greedy_N, self.top_k_N1, self.top_p_N1)
        return Rules(*(None if part is None else part[chunk] for part in parts))


def chunks(rows: int, vocab: int, device: torch.device) -> Sequence[slice]:
    """Slices of the rows whose logits are made and drawn from together."""
    size = max(1, _CHUNK.get(device.type, 1 << 25) // vocab)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def draw(logits_NV: Tensor, uniform_N: Tensor, rules: Rules, banned: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (int64, N) and their log-probs (float32, N). ``uniform_N``: float64 in [0, 1). Overwrites the logits.

    The token is the first whose cumulative probability exceeds ``uniform`` times the total, both in float64.
    """
    logits_NV = tempered(logits_NV, rules.temperature_N1, banned)
    if rules.greedy_N is not None and bool(rules.greedy_N.all()):
        ids_N = logits_NV.argmax(-1)
    else:
        ids_N = _invert(_kept(logits_NV.softmax(-1), rules), uniform_N)
        if rules.greedy_N is not None:
            ids_N = torch.where(rules.greedy_N, logits_NV.argmax(-1), ids_N)
    chosen_N = logits_NV.gather(-1, ids_N[:, None])[:, 0]
    return ids_N, chosen_N - logits_NV.logsumexp(-1)


def tempered(logits_NV: Tensor, temperature_N1: Tensor | None, banned: Tensor) -> Tensor:
    """The float32 logits that are sampled from. Works in place where the logits are float32 already."""
    logits_NV = logits_NV.float()
    if temperature_N1 is not None:
        logits_NV = logits_NV.div_(temperature_N1)
    if len(banned):
        logits_NV = logits_NV.index_fill_(-1, banned, BANNED)
    return logits_NV


def _invert(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    # Rounding may lift the target to the total itself, which no token exceeds.
    below_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    target_N = torch.minimum(uniform_N * total_N, below_N)
    found_N1 = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)
    return found_N1[:, 0].clamp_(max=probs_NV.shape[-1] - 1)  # only NaN gets here, and is refused later


def _kept(probs_NV: Tensor, rules: Rules) -> Tensor:
    """Probabilities, not normalised again, of the tokens that top-k and then top-p keep; 0 for the others."""
    if rules.top_k_N1 is None or rules.top_p_N1 is None:
        return probs_NV
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_NV.shape[-1], device=probs_NV.device)
    sorted_NV = sorted_NV * (rank_V < rules.top_k_N1)
    cumulative_NV = sorted_NV.cumsum(-1, dtype=torch.float64)
    before_NV = cumulative_NV - sorted_NV
    inside_NV = (before_NV < rules.top_p_N1 * cumulative_NV[:, -1:]) | (rules.top_p_N1 >= 1)
    return torch.zeros_like(probs_NV).scatter_(-1, order_NV, sorted_NV * inside_NV)
