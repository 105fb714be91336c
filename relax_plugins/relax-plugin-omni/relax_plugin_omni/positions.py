"""Rotary positions of a row on three axes (time, height, width), without a model: pure numpy.

Text and audio advance all three axes by one a token. An image or a video keeps the position at its start and spreads
over the axes; what follows continues from the largest position so far plus one. The rule is Qwen3-Omni's (3-D mrope,
Qwen2-VL, arXiv:2409.12191; time in seconds, Qwen2.5-Omni, arXiv:2503.20215).

Shape legend: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """Placeholders from ``start`` on, ``t * h * w`` of an image or video, in units of tokens (after merging patches).

    ``step``: positions from one time index to the next (seconds per index x positions per second).
    """

    start: int
    grid: tuple[int, int, int]
    step: float = 1.0
    sound: NDArray[np.bool_] | None = None
    """Which of the placeholders are those of the video's sound, where it is read with it; there are more, then."""

    def positions(self) -> tuple[NDArray[np.int32], int]:
        """(3, placeholders), counted from the block's start, and the position of what follows."""
        t, h, w = self.grid
        times = np.rint(np.arange(t) * self.step).astype(np.int32)
        axes = np.broadcast_arrays(times[:, None, None], np.arange(h)[None, :, None], np.arange(w)[None, None])
        seen_3N = np.stack([a.reshape(-1) for a in axes]).astype(np.int32)
        if self.sound is None:
            return seen_3N, int(seen_3N.max()) + 1
        mixed_3N = np.empty((3, len(self.sound)), np.int32)
        mixed_3N[:, ~self.sound] = seen_3N
        mixed_3N[:, self.sound] = np.arange(int(self.sound.sum()))
        # What follows goes on behind the last run of one kind, as the model's own rule has it.
        last = int(np.flatnonzero(self.sound != self.sound[-1])[-1]) + 1
        return mixed_3N, int(mixed_3N[:, last:].max()) + 1


def rope_positions(length: int, blocks: Sequence[VisionBlock], first: int = 0) -> NDArray[np.int32]:
    """Positions (3, T) of a row, or of its continuation from position ``first``. ``blocks`` are in order of ``start``.

    Positions are whole numbers: a time index that falls between two (frame rates for which ``step`` is no whole number)
    takes the nearer one.
    """
    positions_3T = np.empty((3, length), np.int32)
    at, position = 0, first
    for block in blocks:
        inner_3N, after = block.positions()
        end = block.start + inner_3N.shape[1]
        positions_3T[:, at : block.start] = np.arange(position, position + block.start - at)
        position += block.start - at
        positions_3T[:, block.start : end] = position + inner_3N
        at, position = end, position + after
    positions_3T[:, at:] = np.arange(position, position + length - at)
    return positions_3T
