"""The tools: zoom into and rotate a picture, hear a part of a sound again, see a part of a video again.

Names, arguments and rules of the two for pictures are those of DeepEyes (arXiv 2505.14362); those for sounds and videos
are made in their image. A tool looks at the original, or at any other medium that the play has shown so far.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

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


class Look(Tool):
    """What the tools share. Behind what one shows stands ``hint``, if there is one."""

    def __init__(self, source: Source, hint: str = "", note: Note = lambda where: None) -> None:
        self.source, self.hint, self.note = source, hint, note

    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        shown = await self.look(**arguments)
        return [shown, self.hint] if self.hint else shown

    @abstractmethod
    async def look(self, **arguments: Any) -> MediaPart:
        """What a call with these arguments shows. Raises ToolError for what cannot be shown."""


def _takes(required: str, **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": [required]}


def _which(kind: str, verb: str) -> Mapping[str, Any]:
    said = f"Which {kind}, counted from 0 in the order in which they were {verb}; default: 0."
    return {"type": "integer", "minimum": 0, "description": said}


_LABEL = {"type": "string", "description": "What is looked for there (optional)."}
_SPAN = {
    "type": "array",
    "items": {"type": "number"},
    "minItems": 2,
    "maxItems": 2,
    "description": "The part as [start, end], in seconds from the beginning.",
}


class ZoomIn(Look):
    name = "image_zoom_in_tool"
    description = "Zoom in on a region of a picture: what is inside of a bounding box is shown in full resolution."
    parameters = _takes(
        "bbox_2d",
        bbox_2d={
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "The region as [x1, y1, x2, y2]: (x1, y1) is its top left corner, (x2, y2) the bottom right.",
        },
        label=_LABEL,
        image=_which("picture", "shown"),
    )

    def __init__(self, source: Source, rules: BoxRules, hint: str = "", note: Note = lambda where: None) -> None:
        super().__init__(source, hint, note)
        self.rules = rules

    async def look(self, *, bbox_2d: list[float], label: str = "", image: int = 0) -> Image:
        picture = await self.source("image", image)
        height, width = picture.data.shape[:2]
        box, least = read_box(bbox_2d, width, height, self.rules), self.rules.least_side
        self.note(box)
        return Image(await _aside(box.width * box.height * 3, lambda: crop(picture, box, least)))


class Rotate(Look):
    name = "image_rotate_tool"
    description = "Rotate a picture by an angle."
    parameters = _takes(
        "angle",
        angle={"type": "number", "description": "Degrees: positive turns clockwise, negative counterclockwise."},
        image=_which("picture", "shown"),
    )

    async def look(self, *, angle: float, image: int = 0) -> Image:
        picture = await self.source("image", image)
        height, width = picture.data.shape[:2]
        self.note(Box(0, 0, width, height))
        return Image(await _aside(picture.data.nbytes, lambda: rotate(picture, angle)))


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

    def __init__(self, source: Source, rules: SpanRules, hint: str = "", note: Note = lambda where: None) -> None:
        super().__init__(source, hint, note)
        self.rules = rules

    async def look(self, *, span: list[float], gain_db: float = 0.0, label: str = "", audio: int = 0) -> Audio:
        sound = await self.source("audio", audio)
        start, end = read_span(span, duration(sound), self.rules)
        self.note((start, end))
        return Audio(await _aside(sound.data.nbytes, lambda: cut_sound(sound, start, end, gain_db)))


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

    def __init__(self, source: Source, rules: SpanRules, hint: str = "", note: Note = lambda where: None) -> None:
        super().__init__(source, hint, note)
        self.rules = rules

    async def look(self, *, span: list[float], speed: float = 1.0, label: str = "", video: int = 0) -> Video:
        film = await self.source("video", video)
        start, end = read_span(span, duration(film), self.rules)
        self.note((start, end))
        return Video(await _aside(film.data.nbytes, lambda: cut_video(film, start, end, speed)))


async def _aside(nbytes: int, make: Callable[[], Decoded]) -> Decoded:
    return await asyncio.to_thread(make) if nbytes >= THREAD_BYTES else make()
