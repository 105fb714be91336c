"""Audio toy: whether a tone in noise is high or low."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.types import Audio, Decoded
from relax_envs.toy.base import MediaToy

if TYPE_CHECKING:
    import numpy as np

PROMPT = "which tone ?"
TONES = {"low": (150.0, 500.0), "high": (1200.0, 3000.0)}
"""Hertz, from and to."""
RATE = 16_000
SECONDS = 0.5


class Tone(MediaToy):
    """Half a second at 16 kHz, of any loudness from 0.2 to 0.8 and any phase."""

    name = "tone"
    prompt = PROMPT

    def make(self, rng: np.random.Generator) -> tuple[Audio, str]:
        import numpy as np

        tone = list(TONES)[rng.integers(len(TONES))]
        hertz, loudness, phase = rng.uniform(*TONES[tone]), rng.uniform(0.2, 0.8), rng.uniform(0, 2 * np.pi)
        seconds = np.arange(int(RATE * SECONDS)) / RATE
        wave = loudness * np.sin(2 * np.pi * hertz * seconds + phase) + 0.03 * rng.standard_normal(len(seconds))
        return Audio(Decoded("audio", wave.astype(np.float32), RATE)), tone
