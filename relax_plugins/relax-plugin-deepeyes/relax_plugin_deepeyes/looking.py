"""The tools: zoom into and rotate a picture, hear a part of a sound again, see a part of a video again.

Names, arguments and rules of the two for pictures are those of DeepEyes (arXiv 2505.14362); those for sounds and videos
are made in their image. A tool looks at the original, or at any other medium that the play has shown so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from relax_core.interfaces import ComponentConfig
from relax_core.types import Audio, Decoded, Image, MediaKind, MediaPart, Video
from relax_envs.tools.tool import Output, Tool
from relax_plugin_deepeyes.boxes import Box, BoxRules, read_box
from relax_plugin_deepeyes.pictures import crop, rotate
from relax_plugin_deepeyes.spans import SpanRules, cut_sound, cut_video, duration, read_span

Source = Callable[[MediaKind, int], Awaitable[Decoded]]
"""Gives the medium of a kind that has this number. Raises ToolError where there is none."""
Note = Callable[[Any], None]
"""Is told where a call looks: a Box, or (start, end) in seconds."""

THREAD_BYTES = 1 << 18
"""Media of at least so many bytes are worked on in a thread, so that other plays go on meanwhile."""


class Rules(ComponentConfig):
    boxes: BoxRules = BoxRules()
    """How bounding boxes are read."""
    spans: SpanRules = SpanRules()
    """How spans of time are read."""


class Look(Tool):
    """What the tools share: ``source`` gives what they look at, ``note`` is told where, and behind what they show
    stands ``hint``, if there is one."""

    def __init__(self, source: Source, rules: Rules, *, hint: str = "", note: Note = lambda where: None) -> None:
        self.source, self.rules, self.hint, self.note = source, rules, hint, note

    def shown(self, medium: MediaPart) -> Output:
        return [medium, self.hint] if self.hint else medium


def _takes(required: str, **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": [required]}


def _which(kind: str, verb: str) -> Mapping[str, Any]:
    said = f"Which {kind}, counted from 0 in the order in which they were {verb}; default: 0."
    return {"type": "integer", "minimum": 0, "description": said}


def _numbers(count: int, said: str) -> Mapping[str, Any]:
    return {
        "type": "array",
        "items": {"type": "number"},
        "minItems": count,
        "maxItems": count,
        "description": said,
    }


_LABEL = {"type": "string", "description": "What is looked for there (optional)."}
_SPAN = _numbers(2, "The part as [start, end], in seconds from the beginning.")


class ZoomIn(Look):
    name = "image_zoom_in_tool"
    description = "Zoom in on a region of a picture: what is inside of a bounding box is shown in full resolution."
    parameters = _takes(
        "bbox_2d",
        bbox_2d=_numbers(4, "The region as [x1, y1, x2, y2]: its top left corner, and its bottom right one."),
        label=_LABEL,
        image=_which("picture", "shown"),
    )

    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        picture = await self.source("image", arguments.get("image", 0))
        height, width = picture.data.shape[:2]
        box, least = read_box(arguments["bbox_2d"], width, height, self.rules.boxes), self.rules.boxes.least_side
        self.note(box)
        return self.shown(Image(await _made(box.width * box.height * 3, crop, picture, box, least)))


class Rotate(Look):
    name = "image_rotate_tool"
    description = "Rotate a picture by an angle."
    parameters = _takes(
        "angle",
        angle={"type": "number", "description": "Degrees: positive turns clockwise, negative counterclockwise."},
        image=_which("picture", "shown"),
    )

    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        picture = await self.source("image", arguments.get("image", 0))
        height, width = picture.data.shape[:2]
        self.note(Box(0, 0, width, height))
        return self.shown(Image(await _made(picture.data.nbytes, rotate, picture, arguments["angle"])))


class ListenCloser(Look):
    name = "audio_zoom_in_tool"
    description = "Hear a part of a sound again, on its own and, if wanted, louder."
    parameters = _takes(
        "span",
        span=_SPAN,
        gain_db={"type": "number", "minimum": 0, "maximum": 60, "description": "How much louder, in decibels."},
        label=_LABEL,
        audio=_which("sound", "played"),
    )

    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        sound = await self.source("audio", arguments.get("audio", 0))
        start, end = read_span(arguments["span"], duration(sound), self.rules.spans)
        self.note((start, end))
        gain = arguments.get("gain_db", 0.0)
        return self.shown(Audio(await _made(sound.data.nbytes, cut_sound, sound, start, end, gain)))


class WatchCloser(Look):
    name = "video_zoom_in_tool"
    description = "See a part of a video again with all of its frames and, if wanted, in slow motion."
    parameters = _takes(
        "span",
        span=_SPAN,
        speed={
            "type": "number",
            "minimum": 0.01,
            "maximum": 1,
            "description": "0.25 shows it four times as slowly; default: 1.",
        },
        label=_LABEL,
        video=_which("video", "shown"),
    )

    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        film = await self.source("video", arguments.get("video", 0))
        start, end = read_span(arguments["span"], duration(film), self.rules.spans)
        self.note((start, end))
        speed = arguments.get("speed", 1.0)
        return self.shown(Video(await _made(film.data.nbytes, cut_video, film, start, end, speed)))


async def _made(nbytes: int, make: Callable[..., Decoded], *arguments: Any) -> Decoded:
    """What ``make`` gives; in a thread where it has so much to do that other plays would wait."""
    return await asyncio.to_thread(make, *arguments) if nbytes >= THREAD_BYTES else make(*arguments)
