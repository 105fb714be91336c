"""Messages in OpenAI's format: text, and media as parts with their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.errors import DataError, RelaxError
from relax_core.interfaces import Modality
from relax_core.media_files import file_of, format_of
from relax_core.types import MEDIA_KINDS, Decoded, Image, MediaPart, Message, Text
from relax_envs.openai_media import media_part
from relax_envs.rewards.http import shown


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
        return [self._medium(part)]

    def _pictures(self, video: Decoded) -> list[dict[str, Any]]:
        count = len(video.data)
        chosen = sorted({round(i * (count - 1) / max(1, self.frames - 1)) for i in range(min(self.frames, count))})
        images = [Image(Decoded("image", video.data[i])) for i in chosen]
        note = {"type": "text", "text": f"[a video of {count} frames, of which these are {len(chosen)}, in order]"}
        return [note, *map(self._medium, images)]

    def _medium(self, part: MediaPart) -> dict[str, Any]:
        kind, content = MEDIA_KINDS[type(part)], file_of(part, self.modalities)[1]
        found = format_of(content)
        if kind == "audio" and (found is None or not found.media_type.startswith("audio/")):
            source = f"{len(part.source)} bytes" if isinstance(part.source, bytes) else part.source
            raise DataError(
                f"a sound of {source}: its format is not known: only wav, mp3, flac and ogg can be shown to a judge"
            )
        return media_part(kind, content, found)


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
