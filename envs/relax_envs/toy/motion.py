"""Video toy: which way a square moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.types import Decoded, Video
from relax_envs.toy.base import MediaToy

if TYPE_CHECKING:
    import numpy as np

PROMPT = "which way ?"
DIRECTIONS = ("left", "right", "up", "down")
SIDE, SQUARE, FRAMES = 64, 14, 4
RATE = 2.0
"""Frames per second."""


class Motion(MediaToy):
    """Four frames of 64 x 64: a bright square crosses a dark ground along a row or column."""

    name = "motion"
    prompt = PROMPT

    def make(self, rng: np.random.Generator) -> tuple[Video, str]:
        import numpy as np

        way = DIRECTIONS[rng.integers(len(DIRECTIONS))]
        frames = np.empty((FRAMES, SIDE, SIDE, 3), np.uint8)
        frames[:] = rng.integers(0, 40, 3)
        bright = rng.integers(140, 255, 3)
        across = int(rng.integers(0, SIDE - SQUARE))
        for i in range(FRAMES):
            along = (SIDE - SQUARE) * i // (FRAMES - 1)
            if way in ("left", "up"):
                along = SIDE - SQUARE - along
            x, y = (along, across) if way in ("left", "right") else (across, along)
            frames[i, y : y + SQUARE, x : x + SQUARE] = bright
        return Video(Decoded("video", frames, RATE)), way
