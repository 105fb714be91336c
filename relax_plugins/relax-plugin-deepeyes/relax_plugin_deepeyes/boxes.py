"""Bounding boxes as a model writes them: from four numbers to whole pixels of a picture, or an error that says why not.

The rules are those of DeepEyes (arXiv 2505.14362): boxes are [x1, y1, x2, y2]; what lies outside of the picture is cut
off; a box that is too small is grown about its centre; one that is too narrow is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveInt

from relax_core.interfaces import ComponentConfig
from relax_envs.tools.tool import ToolError

UNITS = {"pixels": None, "thousandths": 1000.0, "fractions": 1.0}
"""What the far edge of a picture is called in each unit; None: its size in pixels."""


class BoxRules(ComponentConfig):
    unit: Literal["pixels", "thousandths", "fractions"] = "pixels"
    """Of the numbers: pixels of the picture as it was given (Qwen2.5-VL), thousandths of its sides (Qwen3-VL), or
    fractions of them."""
    outside: Literal["clip", "refuse"] = "clip"
    """What happens to a box that reaches beyond the picture. One that lies wholly outside is always refused."""
    least_side: PositiveInt = 28
    """Pixels. A box with a shorter side is grown about its centre, in proportion, inside of the picture; a crop of a
    picture that is itself smaller is scaled up."""
    most_ratio: Annotated[float, Field(ge=1)] = 100.0
    """Most times that one side may be as long as the other."""


class Box(NamedTuple):
    """Pixels ``[left, right)`` x ``[top, bottom)`` of a picture."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top

    def covers(self, other: Box) -> bool:
        """Whether all of ``other`` lies inside."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


def read_box(numbers: Sequence[float], width: int, height: int, rules: BoxRules) -> Box:
    """The pixels that ``numbers``, [x1, y1, x2, y2], mean in a picture. Raises ToolError, with what is allowed.

    A pixel that is partly inside counts as inside.
    """
    far = UNITS[rules.unit]
    far_x, far_y = (far or width), (far or height)
    shown = f"[{', '.join(f'{number:g}' for number in numbers)}]"
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        raise ToolError(f"The box {shown} is not four numbers [x1, y1, x2, y2].")
    x1, y1, x2, y2 = numbers
    if x1 >= x2 or y1 >= y2:
        raise ToolError(f"The box {shown} is empty: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2.")
    size = f"the picture reaches from [0, 0] to [{far_x:g}, {far_y:g}]"
    beyond = x1 < 0 or y1 < 0 or x2 > far_x or y2 > far_y
    if x2 <= 0 or y2 <= 0 or x1 >= far_x or y1 >= far_y or (beyond and rules.outside == "refuse"):
        raise ToolError(f"The box {shown} lies outside: {size}.")
    left, right = _whole(x1, x2, width / far_x, width)
    top, bottom = _whole(y1, y2, height / far_y, height)
    box = Box(left, top, right, bottom)
    long, short = max(box.width, box.height), min(box.width, box.height)
    if long > rules.most_ratio * short:
        raise ToolError(f"The box {shown} is too narrow: one side may be {rules.most_ratio:g} times the other at most.")
    return grown(box, width, height, rules.least_side) if short < rules.least_side else box


def grown(box: Box, width: int, height: int, least: int) -> Box:
    """The box scaled about its centre until its shorter side has ``least`` pixels, moved and cut to fit the picture."""
    grow = least / min(box.width, box.height)
    left, right = _stretched(box.left, box.right, grow, width)
    top, bottom = _stretched(box.top, box.bottom, grow, height)
    return Box(left, top, right, bottom)


def _whole(start: float, end: float, scale: float, most: int) -> tuple[int, int]:
    begin = max(0, math.floor(start * scale))
    return begin, min(most, max(begin + 1, math.ceil(end * scale)))


def _stretched(start: int, end: int, grow: float, most: int) -> tuple[int, int]:
    length = min(most, math.ceil((end - start) * grow))
    begin = min(max(0, (start + end - length) // 2), most - length)
    return begin, begin + length
