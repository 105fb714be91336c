"""A task as a person reads it: one line for each message, then its answer and what its metadata are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.types import MEDIA_KINDS, Decoded, MediaPart, Message, Part, Task, Text, ToolCall, ToolResult, ToolSpec

WIDTH = 400
"""Characters of a line, about; longer text is shortened in its middle."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x85: "\\x85",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def describe_task(task: Task) -> list[str]:
    """Lines without line breaks: ``user: what digit ? <image: 7.png>``, ``answer: '7'``, ``metadata: source``."""
    lines = [describe_message(message) for message in task.messages]
    lines.append(f"answer: {_shortened(_one_line(_value(task.answer)))}")
    if task.metadata:
        lines.append(f"metadata: {_shortened(_one_line(', '.join(map(str, task.metadata))))}")
    return lines


def describe_message(message: Message) -> str:
    """``role: content``. Text is shortened, media and tool calls are not."""
    texts = sum(isinstance(part, Text) for part in message.parts) or 1
    return f"{message.role}: {''.join(_part(part, WIDTH // texts) for part in message.parts)}"


def _part(part: Part, width: int) -> str:
    if isinstance(part, Text):
        return _shortened(_one_line(part.text), max(width, 40))
    if isinstance(part, ToolCall):
        label = f" {_one_line(part.id)}" if part.id else ""
        arguments = json.dumps(dict(part.arguments), ensure_ascii=False, default=repr)
        return f"<call{label}: {_one_line(part.name)}({_shortened(_one_line(arguments))})>"
    if isinstance(part, ToolResult):
        inner = "".join(_part(p, width) for p in part.parts)
        return f"<result {_one_line(part.id)}: {inner}>" if part.id else f"<result: {inner}>"
    if isinstance(part, ToolSpec):
        return f"<tool: {_one_line(part.name)}>"
    return _medium(part)


def _medium(part: MediaPart) -> str:
    kind, source = MEDIA_KINDS[type(part)], part.source
    if isinstance(source, Path):
        return f"<{kind}: {_one_line(source.name)}>"
    if isinstance(source, Decoded):
        return f"<{kind}: {' x '.join(map(str, source.data.shape))} decoded>"
    return f"<{kind}: {_size(len(source))}>"


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 10 * size else f"{count // size} {unit}"
    return f"{count} bytes"


def _value(value: Any) -> str:
    """A value as Python writes it, an object as JSON does where that is possible."""
    if isinstance(value, Mapping | list):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return repr(value)
    return repr(value)


def _one_line(text: str) -> str:
    """Line breaks and control characters as escapes; half of a surrogate pair, which no terminal can show, too."""
    return text.translate(_CONTROL).encode("utf-8", "backslashreplace").decode()


def _shortened(text: str, width: int = WIDTH) -> str:
    if len(text) <= width:
        return text
    head, tail = width * 2 // 3, width // 3
    left_out = len(text) - head - tail
    return f"{text[:head]} ... {left_out:,} characters ... {text[-tail:]}"
