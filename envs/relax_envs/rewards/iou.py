"""Reward ``iou``: how well the reply's boxes overlap with the answer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.boxes import Box, Form, box_named, box_of, boxes_in, matched
from relax_envs.rewards.reply import abstains, answer_part, unreadable

Units = Literal["unit", "thousand", "pixels"]


class Iou(Reward):
    """Intersection over union of the reply's box and the answer's, from 0 to 1; with ``threshold`` 0 or 1.

    - Read is the content of the last ``<answer>`` tags, else what comes after the reasoning: ``[x1, y1, x2, y2]`` (in
      JSON too), ``(x1, y1), (x2, y2)``, ``<box>...</box>``, or an object with x1, y1, x2, y2 or x, y, width, height.
    - An answer of one box is compared with the last one of the reply. An answer that is a list of boxes is matched with
      all of them, each used once, greedily by the largest overlap; the reward is the sum of the overlaps (with
      ``threshold``: the number of pairs that reach it) / the larger number of boxes, so that guessing costs. An empty
      list asks for no box: 1 for none, 0 for any.
    - A box without area or with swapped corners, and one with a coordinate that is NaN, infinite or beyond ten
      millions, overlaps nothing: 0, as does a reply without a box. More than ``most`` boxes in a reply are 0.

    Abstains where the task has no answer, and where the play failed; an answer that is no such box is an error of the
    row, which is counted.
    """

    class Config(ComponentConfig):
        format: Form = "xyxy"
        """Four numbers of a reply: two corners, or a corner and the size. The answer's are ``gold_format``."""
        gold_format: Form = "xyxy"
        """Four numbers of the answer."""
        scale: Literal["gold"] | Units = "gold"
        """What the reply's numbers count: as the answer's do (``gold``), 0 to 1 (``unit``), 0 to 1000 (``thousand``),
        or ``pixels`` of an image whose ``width`` and ``height`` stand in the task's metadata."""
        gold_scale: Units = "pixels"
        """What the answer's numbers count; matters only where ``scale`` is another."""
        threshold: Annotated[float, Field(gt=0, le=1)] | None = None
        """An overlap of this or more is 1, a smaller one 0; default: the overlap itself."""
        most: PositiveInt = 50
        """Boxes that a reply may hold."""

        @model_validator(mode="after")
        def _is_needed(self) -> Iou.Config:
            if self.scale == "gold" and self.gold_scale != "pixels":
                raise ValueError("gold_scale matters only where scale is another: set scale too, or leave it out")
            return self

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if abstains(trajectory):
            return None
        config = self.config
        golds = self._gold(trajectory)
        text = answer_part(trajectory.last_reply, "answer")
        found = [*boxes_in(answer_part(trajectory.last_reply, "final") or "" if text is None else text, config.format)]
        if isinstance(golds, Box):
            golds, found = [golds], found[-1:] if len(found) <= config.most else []
        if not golds:
            return float(not found)
        if not found or len(found) > config.most:
            return 0.0
        if config.scale not in ("gold", config.gold_scale):
            to, since = self._units(config.scale, trajectory), self._units(config.gold_scale, trajectory)
            found = [box and _scaled(box, to) for box in found]
            golds = [_scaled(box, since) for box in golds]
        overlaps = matched(found, golds)
        if config.threshold is not None:
            overlaps = [float(overlap >= config.threshold) for overlap in overlaps]
        return sum(overlaps) / max(len(found), len(golds))

    def _gold(self, trajectory: Trajectory) -> Box | list[Box]:
        """One box, or several. Raises DataError for anything else."""
        answer = trajectory.task.answer
        if hasattr(answer, "tolist"):
            answer = answer.tolist()
        several = isinstance(answer, list | tuple) and all(isinstance(one, Sequence | Mapping) for one in answer)
        boxes = [_gold_box(one, self.config.gold_format) for one in (answer if several else [answer])]
        sound = [box for box in boxes if box is not None]
        if len(sound) < len(boxes):
            allowed = "a box [x1, y1, x2, y2] with an area (see gold_format), or a list of boxes"
            raise unreadable(trajectory, trajectory.task.answer, allowed)
        return sound if several else sound[0]

    def _units(self, scale: str, trajectory: Trajectory) -> tuple[float, float]:
        """How much the whole width and height are."""
        if scale != "pixels":
            side = 1.0 if scale == "unit" else 1000.0
            return side, side
        size = [trajectory.task.metadata.get(key) for key in ("width", "height")]
        if not all(isinstance(side, int | float) and side > 0 for side in size):
            raise DataError(
                f"task {trajectory.task.id!r}: width and height in the metadata are {size}; to compare pixels with "
                "other units both must be numbers above 0"
            )
        width, height = size
        return float(width or 0), float(height or 0)


def _scaled(box: Box, by: tuple[float, float]) -> Box:
    return Box(box.left / by[0], box.top / by[1], box.right / by[0], box.bottom / by[1])


def _gold_box(answer: Any, form: Form) -> Box | None:
    """The box of a list, an object or a text."""
    if isinstance(answer, str):
        found = [*boxes_in(answer, form)]
        return found[0] if len(found) == 1 else None
    if isinstance(answer, Mapping):
        named = box_named(answer)
        if named is None:
            return None
        answer, form = named
    if not isinstance(answer, list | tuple) or len(answer) != 4:
        return None
    if not all(isinstance(side, int | float) and not isinstance(side, bool) for side in answer):
        return None
    return box_of([float(side) for side in answer], form)
