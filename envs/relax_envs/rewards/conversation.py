"""A play as plain data, for graders outside: other programs and users' functions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.conversations import said
from relax_core.errors import DataError
from relax_core.types import (
    MEDIA_KINDS,
    Audio,
    Image,
    Message,
    Part,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    Video,
)


def messages_of(trajectory: Trajectory, media: bool = False) -> list[dict[str, Any]]:
    """Everything said before the last reply, as ``{role, content}``; the task's messages where nothing was played.

    ``content`` is text, or a list of parts where there is more than text: ``{type: text, text}``, ``{type: image}``
    (audio, video; with ``media`` also ``data``, its encoded bytes in base64), ``{type: tool_call, name, arguments,
    id}``, ``{type: tool_result, content, id}`` and ``{type: tool, name, description,
    parameters}``. Raises DataError where ``media`` are asked for and have no bytes.
    """
    turns = trajectory.turns
    before = said(turns, len(turns) - 1)[:-1] if turns else trajectory.task.messages
    return [_message(message, media) for message in before]


def _message(message: Message, media: bool) -> dict[str, Any]:
    plain = all(isinstance(part, Text) for part in message.parts)
    return {"role": message.role, "content": message.text if plain else [_part(part, media) for part in message.parts]}


def _part(part: Part, media: bool) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, ToolCall):
        return {"type": "tool_call", "name": part.name, "arguments": dict(part.arguments), "id": part.id}
    if isinstance(part, ToolResult):
        return {"type": "tool_result", "content": [_part(inner, media) for inner in part.parts], "id": part.id}
    if isinstance(part, ToolSpec):
        spec = {"name": part.name, "description": part.description, "parameters": dict(part.parameters)}
        return {"type": "tool", **spec}
    return {"type": MEDIA_KINDS[type(part)], **({"data": _encoded(part)} if media else {})}


def _encoded(part: Image | Audio | Video) -> str:
    content = part.source
    if isinstance(content, Path):
        try:
            content = content.read_bytes()
        except OSError as error:
            raise DataError(f"{part.source!s}: {error.strerror or error}: it was to be sent to a grader") from error
    if not isinstance(content, bytes):
        raise DataError(
            f"a {MEDIA_KINDS[type(part)]} that was made, not read, has no encoded bytes to send: set media: false"
        )
    return base64.b64encode(content).decode()


def plain(value: Any) -> Any:
    """What JSON can say of a value: numbers and arrays of other libraries become Python's. Raises TypeError."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be said in JSON")
