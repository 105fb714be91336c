"""Image toy: the colour of a tag that a small picture of the scene shows as grey.

Shape legend: H height, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.types import Decoded, Image
from relax_envs.tools.tool import Tool
from relax_plugin_deepeyes.boxes import Box
from relax_plugin_deepeyes.looking import Note, Rules, Source, ZoomIn
from relax_plugin_deepeyes.toy.base import LookToy, answer_word, call_word

if TYPE_CHECKING:
    import numpy as np

PROMPT = "what colour ?"
COLOURS = {"red": (230, 20, 20), "green": (20, 220, 40), "blue": (30, 40, 240), "yellow": (235, 225, 20)}
SIDE, TAG, CELL, SCALE = 128, 32, 2, 4
"""Pixels of the scene, of the tag and of its cells; how many of the scene's become one of the glimpse."""
TAGS = tuple(Box(x, y, x + TAG, y + TAG) for y in (16, 80) for x in (16, 80))
"""Where the tag may be: in the middle of a quadrant."""

WRONG_CALLS = (
    call_word("image_zoom_in_tool", {"bbox_2d": [144, 144, 176, 176]}),  # outside of the picture
    call_word("image_zoom_in_tool", {"bbox_2d": [16, 16, 48]}),  # three numbers
    '<tool_call>{"name":"image_zoom_in_tool"</tool_call>',  # no JSON
)
WORDS = (
    *PROMPT.split(),
    *map(answer_word, COLOURS),
    *(call_word("image_zoom_in_tool", {"bbox_2d": list(box)}) for box in TAGS),
    *WRONG_CALLS,
)
"""The vocabulary of a tiny model that plays it."""


class Zoom(LookToy):
    """A dark scene of 128 x 128 with noise; one quadrant holds a tag of 32 x 32, whose cells of 2 x 2 have a colour and
    its complement in turn. The glimpse averages 4 x 4 pixels: the tag is the same grey for every colour."""

    name = "deepeyes-zoom"
    prompt = PROMPT
    places = TAGS
    answers = tuple(COLOURS)

    def make(self, rng: np.random.Generator, place: int, answer: str) -> tuple[Decoded, Image]:
        import numpy as np

        scene_HW3 = rng.integers(60, 80, (SIDE, SIDE, 3)).astype(np.uint8)
        y, x = np.mgrid[:TAG, :TAG] // CELL
        own, tag = np.array(COLOURS[answer], np.uint8), TAGS[place]
        scene_HW3[tag.top : tag.bottom, tag.left : tag.right] = np.where((x + y)[..., None] % 2 == 0, own, 255 - own)
        squares = scene_HW3.reshape(SIDE // SCALE, SCALE, SIDE // SCALE, SCALE, 3)
        glimpse_HW3 = squares.mean((1, 3)).astype(np.uint8)
        return Decoded("image", scene_HW3), Image(Decoded("image", glimpse_HW3))

    def tool(self, source: Source, note: Note) -> Tool:
        return ZoomIn(source, Rules(), note=note)

    def shows(self, where: Box, place: Box) -> bool:
        """All of the tag, and at most a quadrant."""
        return where.covers(place) and max(where.width, where.height) <= SIDE // 2
