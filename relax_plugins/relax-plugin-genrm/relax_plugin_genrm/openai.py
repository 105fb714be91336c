"""Messages in OpenAI's format: text, and media as parts with their content."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.errors import DataError, RelaxError
from relax_core.interfaces import Modality
from relax_core.types import MEDIA_KINDS, Audio, Decoded, Image, MediaPart, Message, Text
from relax_envs.rewards.http import shown

_TYPES = (
    (b"\x89PNG", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"GIF8", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
    (b"BM", 0, "image/bmp"),
    (b"WAVE", 8, "audio/wav"),
    (b"ID3", 0, "audio/mp3"),
    (b"\xff\xfb", 0, "audio/mp3"),
    (b"fLaC", 0, "audio/flac"),
    (b"OggS", 0, "audio/ogg"),
    (b"ftyp", 4, "video/mp4"),
    (b"\x1aE\xdf\xa3", 0, "video/webm"),
    (b"AVI ", 8, "video/x-msvideo"),
)
"""How files begin: bytes, their place, and the media type."""


class Encoder:
    """Turns messages into a request's ``messages``. ``modalities`` write media that were made, not read, by kind; of
    such a video ``frames`` pictures are sent, evenly spread."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.modalities: Mapping[str, Modality] = {}

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Raises DataError for a medium that cannot be read or sent. Blocks: it may read files."""
        return [{"role": message.role, "content": self._content(message)} for message in messages]

    def _content(self, message: Message) -> str | list[dict[str, Any]]:
        if all(isinstance(part, Text) for part in message.parts):
            return message.text
        return [found for part in message.parts for found in self._part(part)]

    def _part(self, part: Any) -> list[dict[str, Any]]:
        if isinstance(part, Text):
            return [{"type": "text", "text": part.text}]
        if isinstance(part.source, Decoded) and part.source.kind == "video":
            return self._pictures(part.source)
        return [_medium(part, self._bytes(part))]

    def _pictures(self, video: Decoded) -> list[dict[str, Any]]:
        count = len(video.data)
        chosen = sorted({round(i * (count - 1) / max(1, self.frames - 1)) for i in range(min(self.frames, count))})
        images = [Image(Decoded("image", video.data[i])) for i in chosen]
        note = {"type": "text", "text": f"[a video of {count} frames, of which these are {len(chosen)}, in order]"}
        return [note, *(_medium(image, self._bytes(image)) for image in images)]

    def _bytes(self, part: MediaPart) -> bytes:
        source, kind = part.source, MEDIA_KINDS[type(part)]
        if isinstance(source, bytes):
            return source
        if not isinstance(source, Decoded):
            try:
                return source.read_bytes()
            except OSError as error:
                raise DataError(f"{source}: {error.strerror or error}: it was to be shown to a judge") from error
        if kind not in self.modalities:
            raise DataError(f"a {kind} that was made, not read: only in a run can it be shown to a judge")
        return self.modalities[kind].dump(source)[1]


def _medium(part: MediaPart, content: bytes) -> dict[str, Any]:
    kind, data = MEDIA_KINDS[type(part)], base64.b64encode(content).decode()
    found = next((t for mark, at, t in _TYPES if content[at : at + len(mark)] == mark), None)
    if isinstance(part, Audio):
        return {"type": "input_audio", "input_audio": {"data": data, "format": _format(found, part)}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{found or f'{kind}/*'};base64,{data}"}}


def _format(media_type: str | None, part: Audio) -> str:
    if media_type is None or not media_type.startswith("audio/"):
        raise DataError(
            f"a sound of {len(part.source) if isinstance(part.source, bytes) else part.source}: its format "
            "is not known: only wav, mp3, flac and ogg can be shown to a judge"
        )
    return media_type.removeprefix("audio/")


def answer_of(found: Mapping[str, Any], url: str) -> tuple[str, bool]:
    """The text of a completion and whether it ended by itself. Raises RelaxError for what is no completion."""
    try:
        choice = found["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RelaxError(f"{url}: the answer is no chat completion: {shown(found)}") from error
    if not isinstance(text, str):
        raise RelaxError(f"{url}: the answer has no text: {shown(found)}")
    return text, reason in ("stop", None)
