"""Image toy: which of four colours a noisy shape has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.types import Decoded, Image
from relax_envs.toy.base import MediaToy

if TYPE_CHECKING:
    import numpy as np

PROMPT = "what colour ?"
COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230), "yellow": (230, 220, 50)}
SIDE = 64


class Colour(MediaToy):
    """A disc or a square of 20 to 35 pixels, anywhere on a dark ground of 64 x 64, with noise of 12 levels."""

    name = "colour"
    prompt = PROMPT

    def make(self, rng: np.random.Generator) -> tuple[Image, str]:
        import numpy as np

        colour = list(COLOURS)[rng.integers(len(COLOURS))]
        size = int(rng.integers(20, 36))
        left, top = rng.integers(0, SIDE - size, 2)
        y, x = np.mgrid[0:SIDE, 0:SIDE]
        if rng.random() < 0.5:
            radius = size / 2
            inside = (x - left - radius) ** 2 + (y - top - radius) ** 2 <= radius**2
        else:
            inside = (x >= left) & (x <= left + size) & (y >= top) & (y <= top + size)
        pixels = np.where(inside[:, :, None], COLOURS[colour], rng.integers(0, 70, 3))
        noisy = np.clip(pixels + rng.integers(-12, 12, pixels.shape), 0, 255).astype(np.uint8)
        return Image(Decoded("image", noisy)), colour
