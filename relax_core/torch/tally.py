"""Sums and counts of a training step's metrics, kept on the device and read once.

Legend: B rows, T window width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from relax_core.interfaces import Batch, Row

_MAX_LOG_RATIO = 20.0


class Tally:
    """Means over all micro-batches of a step, and how far the engine's policy was from the trainer's."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[Tensor]] = {}
        self._mismatch: list[Tensor] = []
        self._modalities: list[str] = []

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Sums and counts by name."""
        for name, pair in metrics.items():
            new = torch.stack([x.detach().double().to(pair[0].device) for x in pair])
            self._pairs.setdefault(name, []).append(new)

    def mismatch(self, rows: Sequence[Row], batch: Batch, old_BT: Tensor) -> None:
        """Compare the policy at the start of the step with the engine's: d = log p_old - log mu, sampled tokens."""
        d_BT = torch.where(batch.mask_BT, old_BT - batch.logprobs_BT, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        k3_BT = torch.expm1(d_BT) - d_BT  # estimates KL(mu || p_old), since tokens are mu's
        sums_B3 = torch.stack([d_BT.abs().sum(1), k3_BT.sum(1), batch.mask_BT.sum(1)], 1)
        self._mismatch.append(sums_B3.detach().double())
        self._modalities += [modality(row) for row in rows]

    def means(self) -> dict[str, float]:
        """Every metric that has a count and is finite (what skipped updates leave may not be); in a fixed order."""
        found: dict[str, float] = {}
        for name in sorted(self._pairs):
            total, count = torch.stack(self._pairs[name]).sum(0).tolist()
            if count and math.isfinite(total):
                found[name] = total / count
        return found | self._mismatches()

    def _mismatches(self) -> dict[str, float]:
        if not self._mismatch:
            return {}
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for kind, row in zip(self._modalities, torch.cat(self._mismatch).tolist(), strict=True):
            for name in ("mismatch", f"mismatch/{kind}"):
                sums[name] = [a + b for a, b in zip(sums[name], row, strict=True)]
        found: dict[str, float] = {}
        for name, (distance, k3, count) in sorted(sums.items()):
            found |= {f"{name}/abs": distance / count, f"{name}/k3": k3 / count}
        return {name: value for name, value in found.items() if math.isfinite(value)}


def modality(row: Row) -> str:
    """``text``, or the kinds of media in the row joined by ``+``."""
    return "+".join(sorted({ref.kind for ref in row.columns["media"]})) or "text"
