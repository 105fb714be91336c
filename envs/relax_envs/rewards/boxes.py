"""Boxes of an image, as models write them: reading them from text, and how much two of them overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Form = Literal["xyxy", "xywh"]

LARGEST = 1e7
"""Coordinates beyond this are no coordinates."""

_N = r"\s{0,9}([-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf(?:inity)?))\s{0,9}"
_C = r"(?:,|;|(?<=\s))"
_FOUR = rf"{_N}{_C}{_N}{_C}{_N}{_C}{_N}"
_PAIRS = rf"[(\[]{_N}{_C}{_N}[)\]]\s{{0,9}},?\s{{0,9}}[(\[]{_N}{_C}{_N}[)\]]"
_KEYS = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"), ("left", "top", "right", "bottom"))
_SIZED = (("x", "y", "width", "height"), ("x", "y", "w", "h"), ("left", "top", "width", "height"))
_BOX = re.compile(
    rf"<box>{_FOUR}</box>|[(\[{{]{_FOUR}[)\]}}]|{_PAIRS}|(\{{[^{{}}\[\]]{{1,400}}\}})", re.IGNORECASE | re.ASCII
)
_FIELD = re.compile(rf"[\"']?([a-z]+[12]?)[\"']?\s{{0,9}}[:=]{_N}", re.IGNORECASE | re.ASCII)


class Box(NamedTuple):
    """Left, top, right and bottom; right and bottom are larger."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def box_of(numbers: Sequence[float], form: Form) -> Box | None:
    """A box of four finite numbers; None where it has no area, has swapped corners, or is beyond ``LARGEST``."""
    if not all(math.isfinite(number) and abs(number) <= LARGEST for number in numbers):
        return None
    a, b, c, d = numbers
    box = Box(a, b, c, d) if form == "xyxy" else Box(a, b, a + c, b + d)
    return box if box.right > box.left and box.bottom > box.top and box.area > 0 else None


def boxes_in(text: str, form: Form) -> Iterator[Box | None]:
    """What a text has of boxes, in order; None for four numbers that are none (see ``box_of``).

    ``[x, y, x, y]`` in any brackets, alone or in JSON; ``(x, y), (x, y)``; ``<box>...</box>`` around either; and
    objects with x1, y1, x2, y2 (or xmin ..., left ...), or with x, y, width, height (w, h), which say their form.
    """
    for found in _BOX.finditer(text):
        if found[13]:
            if (box := _of_fields(found[13])) is not False:
                yield box
            continue
        numbers = [float(group) for group in found.groups()[:12] if group is not None]
        corners = form if found[9] is None else "xyxy"
        yield box_of(numbers, corners)


def _of_fields(text: str) -> Box | Literal[False] | None:
    """The box of an object without inner ones; False where it speaks of something else."""
    fields: dict[str, float] = {match[1].lower(): float(match[2]) for match in _FIELD.finditer(text)}
    named = box_named(fields)
    return False if named is None else box_of(*named)


def box_named(fields: Mapping[str, Any]) -> tuple[list[Any], Form] | None:
    """The four values of an object and their form, by its keys."""
    for keys in _KEYS:
        if all(key in fields for key in keys):
            return [fields[key] for key in keys], "xyxy"
    for keys in _SIZED:
        if all(key in fields for key in keys):
            return [fields[key] for key in keys], "xywh"
    return None


def iou(one: Box, other: Box) -> float:
    """Intersection over union, from 0 to 1."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (one.area + other.area - width * height)


def matched(found: Sequence[Box | None], gold: Sequence[Box]) -> list[float]:
    """The overlaps of pairs of a found and a gold box, each used once at most, chosen greedily: best overlap first."""
    pairs = [(iou(box, other), i, j) for i, box in enumerate(found) if box is not None for j, other in enumerate(gold)]
    overlaps: list[float] = []
    used: tuple[set[int], set[int]] = (set(), set())
    for overlap, i, j in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if overlap > 0 and i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            overlaps.append(overlap)
    return overlaps
