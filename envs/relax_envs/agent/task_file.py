"""A task as a file that an agent reads, and the result that it may write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.media_files import Format, format_of
from relax_core.serial import pack
from relax_core.types import (
    MEDIA_KINDS,
    MediaPart,
    Message,
    Part,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from relax_envs.agent.errors import AgentResult
from relax_envs.openai_media import media_part

Dump = Callable[[MediaPart], tuple[str, bytes]]
"""File suffix and bytes of a medium."""

_MOST_RESULT = 1 << 20
"""Bytes of a result file."""


# --- the task ---------------------------------------------------------------------------------------------------------


def write_task(task: Task, folder: Path, dump: Dump) -> Path:
    """``task.json`` in ``folder``, and its media in ``folder/media``; the file's path. The answer is left out.

    ``messages`` can be sent as they are: media are inside as ``data:`` addresses.
    """
    writer = _Writer(folder / "media", dump)
    content = {
        "id": task.id,
        "messages": [turn for m in task.messages for turn in writer.turns(m)],
        "tools": [_tool(part) for m in task.messages for part in m.parts if isinstance(part, ToolSpec)],
        "media": writer.files,
        "metadata": pack(dict(task.metadata)),
    }
    path = folder / "task.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


class _Writer:
    def __init__(self, folder: Path, dump: Dump) -> None:
        self.folder, self.dump = folder, dump
        self.files: list[dict[str, str]] = []

    def turns(self, m: Message) -> list[dict[str, Any]]:
        """A message as OpenAI has it; tool results become one each."""
        if m.role == "tool":
            results = [part for part in m.parts if isinstance(part, ToolResult)]
            return [{"role": "tool", "tool_call_id": r.id, "content": self._content(r.parts)} for r in results]
        said = [part for part in m.parts if not isinstance(part, ToolSpec | ToolCall)]
        calls = [_call(part) for part in m.parts if isinstance(part, ToolCall)]
        if not said and not calls:
            return []  # tools alone
        content = self._content(said) if said else None
        return [{"role": m.role, "content": content} | ({"tool_calls": calls} if calls else {})]

    def _content(self, parts: Sequence[Part]) -> str | list[dict[str, Any]]:
        if all(isinstance(part, Text) for part in parts):
            return "".join(part.text for part in parts if isinstance(part, Text))
        return [self._part(part) for part in parts]

    def _part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Text):
            return {"type": "text", "text": part.text}
        assert not isinstance(part, ToolCall | ToolResult | ToolSpec)
        kind = MEDIA_KINDS[type(part)]
        suffix, content = self.dump(part)
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{len(self.files) + 1}{suffix}"
        path.write_bytes(content)
        self.files.append({"kind": kind, "path": str(path)})
        return media_part(kind, content, format_of(content) or Format(suffix, f"{kind}/{suffix.removeprefix('.')}"))


def _tool(spec: ToolSpec) -> dict[str, Any]:
    described = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
    return {"type": "function", "function": described}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """``answer``: what rewards read instead of the last reply; None: there is none."""

    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_result(path: Path) -> Result:
    """``{"answer": "text", "metrics": {"name": 1.5}}``; both may be left out, and so may the file.

    Raises AgentResult.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_RESULT + 1)
    except FileNotFoundError:
        return Result()
    except OSError as error:
        raise AgentResult(f"result file: {error.strerror}") from error
    if len(content) > _MOST_RESULT:
        raise AgentResult(f"result file: more than {_MOST_RESULT:,} bytes; write less")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentResult(f"result file: not JSON: {error}") from error
    if not isinstance(found, dict) or not found.keys() <= {"answer", "metrics"}:
        raise AgentResult("result file: an object with 'answer' and 'metrics' is allowed, and nothing else")
    answer, metrics = found.get("answer"), found.get("metrics") or {}
    if answer is not None and not isinstance(answer, str):
        raise AgentResult("result file: 'answer' is no text")
    if not isinstance(metrics, dict) or not all(map(_is_number, metrics.values())):
        raise AgentResult("result file: 'metrics' is an object of numbers, and they are finite")
    return Result(answer, {name: float(value) for name, value in metrics.items()})


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
