"""Video toy: which way a square moves, in a film of which one frame of each part is shown first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.types import Decoded, Video
from relax_envs.tools.tool import Tool
from relax_plugin_deepeyes.looking import Note, Rules, Source, WatchCloser
from relax_plugin_deepeyes.toy.base import LookToy, answer_word, call_word

if TYPE_CHECKING:
    import numpy as np

PROMPT = "which way ?"
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps across and down."""
SIDE, SQUARE, STEP = 32, 10, 3
"""Pixels of the film and of the square, and how many it moves from frame to frame."""
RATE, FRAMES = 8.0, 4
"""Frames per second, and of a part."""
SPANS = tuple((i * FRAMES / RATE, (i + 1) * FRAMES / RATE) for i in range(2))
"""The parts. In one of them there is a square."""
SPEEDS = (0.25, 0.5, 1.0)

WORDS = (
    *PROMPT.split(),
    *map(answer_word, WAYS),
    *(call_word("video_zoom_in_tool", {"span": list(span), "speed": speed}) for speed in SPEEDS for span in SPANS),
    call_word("video_zoom_in_tool", {"span": [3.0, 4.0]}),  # behind the end
    call_word("video_zoom_in_tool", {"span": [0.0, 0.5], "speed": 0}),  # stands still
    '<tool_call>{"name":"video_zoom_in_tool","arguments":{"span":[0.0,0.5]}',  # not ended
)
"""The vocabulary of a tiny model that plays it."""


class Watch(LookToy):
    """A film of two parts of four frames, 32 x 32 at 8 a second. In one part a bright square starts from the middle.
    The glimpse shows the first frame of each part, in fast motion: the square, but not yet where it goes."""

    name = "deepeyes-watch"
    prompt = PROMPT
    places = SPANS
    answers = tuple(WAYS)

    def make(self, rng: np.random.Generator, place: int, answer: str) -> tuple[Decoded, Video]:
        import numpy as np

        frames = rng.integers(0, 40, (len(SPANS) * FRAMES, SIDE, SIDE, 3)).astype(np.uint8)
        bright, (across, down) = rng.integers(140, 255, 3), WAYS[answer]
        for i in range(FRAMES):
            x, y = ((SIDE - SQUARE) // 2 + STEP * i * step for step in (across, down))
            frames[place * FRAMES + i, y : y + SQUARE, x : x + SQUARE] = bright
        glimpse = Decoded("video", np.ascontiguousarray(frames[::FRAMES]), RATE)
        return Decoded("video", frames, RATE), Video(glimpse)

    def tool(self, source: Source, note: Note) -> Tool:
        return WatchCloser(source, Rules(), note=note)

    def shows(self, where: tuple[float, float], place: tuple[float, float]) -> bool:
        """All of the part, and nothing of others."""
        return abs(where[0] - place[0]) < 0.01 and abs(where[1] - place[1]) < 0.01
