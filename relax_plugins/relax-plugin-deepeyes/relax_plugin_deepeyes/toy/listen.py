"""Audio toy: the pitch of a soft tone, in a recording of which only the beginnings of its parts are played first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.types import Audio, Decoded
from relax_envs.tools.tool import Tool
from relax_plugin_deepeyes.looking import ListenCloser, Note, Rules, Source
from relax_plugin_deepeyes.toy.base import LookToy, answer_word, call_word

if TYPE_CHECKING:
    import numpy as np

PROMPT = "which tone ?"
TONES = {"low": (150, 500), "middle": (700, 1300), "high": (1700, 3000), "shrill": (3800, 7000)}
"""Hertz of a chord's lowest and highest tone."""
PARTIALS = 12
"""Tones of a chord."""
RATE = 16_000
PART, START = 0.32, 0.08
"""Seconds of a part, and of its beginning."""
SPANS = tuple((i * PART, (i + 1) * PART) for i in range(2))
"""The parts. In one of them there is a knock and, behind it, the tone."""
GAINS_DB = (10, 20, 30)

_KNOCK, _SOFT, _HISS = 0.3, 0.01, 1e-5
"""How loud; 1 is full scale."""

WORDS = (
    *PROMPT.split(),
    *map(answer_word, TONES),
    *(call_word("audio_zoom_in_tool", {"span": list(span), "gain_db": gain}) for gain in GAINS_DB for span in SPANS),
    call_word("audio_zoom_in_tool", {"span": [2.0, 3.0]}),  # behind the end
    call_word("audio_zoom_in_tool", {"span": 0.64}),  # one number
    call_word("image_zoom_in_tool", {"bbox_2d": [0, 0, 32, 32]}),  # another toy's tool
)
"""The vocabulary of a tiny model that plays it."""


class Listen(LookToy):
    """A recording of two parts of 0.32 s at 16 kHz, in which a knock tells where a soft tone follows. The glimpse
    plays the first 0.08 s of each part: the knock, and nothing of the tone."""

    name = "deepeyes-listen"
    prompt = PROMPT
    places = SPANS
    answers = tuple(TONES)

    def make(self, rng: np.random.Generator, place: int, answer: str) -> tuple[Decoded, Audio]:
        import numpy as np

        length, start = round(PART * RATE), round(START * RATE)
        parts = _HISS * rng.standard_normal((len(SPANS), length))
        parts[place, :start] += _KNOCK * rng.uniform(0.5, 1) * rng.uniform(-1, 1, start)
        glimpse = parts[:, :start].ravel().astype(np.float32)
        hertz = np.linspace(*TONES[answer], PARTIALS) * rng.uniform(0.97, 1.03)
        turns = np.outer(hertz, np.arange(length - start) / RATE) + rng.uniform(0, 1, (PARTIALS, 1))
        parts[place, start:] += _SOFT * np.sin(2 * np.pi * turns).sum(0)
        whole = Decoded("audio", parts.ravel().astype(np.float32), RATE)
        return whole, Audio(Decoded("audio", glimpse, RATE))

    def tool(self, source: Source, note: Note) -> Tool:
        return ListenCloser(source, Rules(), note=note)

    def shows(self, where: tuple[float, float], place: tuple[float, float]) -> bool:
        """Some of the tone, and nothing of other parts."""
        return place[0] - 0.01 <= where[0] and where[1] <= place[1] + 0.01 and where[1] > place[0] + START
