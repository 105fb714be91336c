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
        self._rows: dict[str, list[Tensor]] = defaultdict(list)
        """Sums and counts of each row (B, 2), by the name of the mismatch."""
        self._modalities: dict[str, list[str]] = defaultdict(list)

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Sums and counts by name."""
        for name, pair in metrics.items():
            new = torch.stack([x.detach().double().to(pair[0].device) for x in pair])
            self._pairs.setdefault(name, []).append(new)

    def mismatch(self, rows: Sequence[Row], batch: Batch, old_BT: Tensor) -> None:
        """Compare the policy at the start of the step with the engine's: d = log p_old - log mu, sampled tokens."""
        d_BT = torch.where(batch.mask_BT, old_BT - batch.logprobs_BT, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        self._by_row("abs", rows, batch.mask_BT, d_BT.abs())
        self._by_row("k3", rows, batch.mask_BT, torch.expm1(d_BT) - d_BT)  # of KL(mu || p_old): tokens are mu's

    def clipped(self, rows: Sequence[Row], batch: Batch, clipped_BT: Tensor | None) -> None:
        """Count the sampled tokens that clipping or rejection took the gradient from; None: there are none."""
        found_BT = torch.zeros_like(batch.mask_BT) if clipped_BT is None else clipped_BT & batch.mask_BT
        self._by_row("clipped", rows, batch.mask_BT, found_BT)

    def _by_row(self, name: str, rows: Sequence[Row], mask_BT: Tensor, values_BT: Tensor) -> None:
        """``values_BT`` must be 0 where the mask is."""
        self._rows[name].append(torch.stack([values_BT.sum(1), mask_BT.sum(1)], 1).detach().double())
        self._modalities[name] += [modality(row) for row in rows]

    def sums(self) -> Sums:
        """Sum and count of everything, by (kind of number, name); picklable, to be added over ranks."""
        found: Sums = {}
        for name in sorted(self._pairs):
            total, count = torch.stack(self._pairs[name]).sum(0).tolist()
            found["", name] = (total, count)
        for name, parts in self._rows.items():
            for kind, (total, count) in zip(self._modalities[name], torch.cat(parts).tolist(), strict=True):
                for key in (f"mismatch/{name}", f"mismatch/{kind}/{name}"):
                    before = found.get(("mismatch", key), (0.0, 0.0))
                    found["mismatch", key] = (before[0] + total, before[1] + count)
        return found

    def means(self) -> dict[str, float]:
        """Every metric that has a count and is finite (what skipped updates leave may not be); in a fixed order."""
        return means([self.sums()])


Sums = dict[tuple[str, str], tuple[float, float]]


def means(parts: Sequence[Sums]) -> dict[str, float]:
    """The means of a step from the sums of its ranks; see ``Tally.means``."""
    added: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for part in parts:
        for key, (total, count) in part.items():
            added[key] = [added[key][0] + total, added[key][1] + count]
    return {name: total / n for (_, name), (total, n) in sorted(added.items()) if n and math.isfinite(total)}


def modality(row: Row) -> str:
    """``text``, or the kinds of media in the row joined by ``+``."""
    return "+".join(sorted({ref.kind for ref in row.columns["media"]})) or "text"
