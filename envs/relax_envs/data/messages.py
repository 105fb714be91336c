"""Conversations in the usual spellings (OpenAI's, ShareGPT's) as messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from relax_core.types import MediaKind, MediaPart, Message, Part, Role, Text, ToolCall, ToolResult
from relax_envs.data.media import PARTS, Media
from relax_envs.data.values import RowError, is_well_formed, kind_name, missing, short

ROLES = get_args(Role)

_SPEAKERS: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's ``from`` and what it means."""

_NO_MEDIUM = {"detail", "format", "uuid", "id", "cache_control"}
"""Keys of a part that say nothing of which medium it is."""

_PLACEHOLDER = re.compile(r"<(image|audio|video)>")
_KEYS = ("role", "content", "name")
_MORE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}


def messages_of(value: Any, where: str, media: Media) -> list[Message]:
    """The messages of a conversation; ``where`` names the column. Raises RowError."""
    if not isinstance(value, list) or not value:
        found = kind_name(value) if not missing(value) or isinstance(value, str) else "empty"
        raise RowError(f"{where!r} is {found}; a list of messages is allowed")
    return [_message(item, f"message {i}", media) for i, item in enumerate(value, 1)]


def _message(item: Any, where: str, media: Media) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{where} is {kind_name(item)}; an object with 'role' and 'content' is allowed")
    if "role" not in item and "from" in item:
        return _spoken(item, where, media)
    role = item.get("role")
    if role not in ROLES:
        raise RowError(f"{where}: role {role!r}; allowed are {', '.join(ROLES)}")
    _refuse_others(item, (*_KEYS, *_MORE.get(str(role), ())), where)
    calls = [] if missing(item.get("tool_calls")) else _calls(item["tool_calls"], where)
    parts = _content(item.get("content"), where, media, optional=bool(calls))
    if role == "tool":
        return Message("tool", (_result(parts, item.get("tool_call_id"), where),))
    return Message(cast(Role, role), (*parts, *calls))


def _spoken(item: Mapping[str, Any], where: str, media: Media) -> Message:
    """ShareGPT's ``{"from": "human", "value": "..."}``."""
    speaker = item["from"]
    if speaker not in _SPEAKERS:
        raise RowError(f"{where}: from {speaker!r}; allowed are {', '.join(_SPEAKERS)}")
    _refuse_others(item, ("from", "value"), where)
    if speaker == "function_call":
        return Message("assistant", tuple(_calls(_json(item.get("value"), f"{where}: a function call"), where)))
    if not isinstance(item.get("value"), str):
        raise RowError(f"{where}: 'value' is {kind_name(item.get('value'))}; text is allowed")
    parts = text_parts(item["value"], where, media)
    role = _SPEAKERS[speaker]
    return Message(role, (_result(parts, None, where),) if role == "tool" else tuple(parts))


def _refuse_others(item: Mapping[str, Any], read: Sequence[str], where: str) -> None:
    if unread := sorted(key for key, value in item.items() if key not in read and not missing(value)):
        allowed = f"{', '.join(map(repr, read[:-1]))} and {read[-1]!r}"
        raise RowError(f"{where}: {', '.join(map(repr, unread))} cannot be used here; {allowed} are allowed")


# --- content ------------------------------------------------------------------------------------------------------


def _content(content: Any, where: str, media: Media, optional: bool) -> list[Part]:
    if isinstance(content, str):
        return text_parts(content, where, media)
    if isinstance(content, list):
        return [part for value in content for part in _part(value, where, media)]
    if optional and missing(content):
        return []
    raise RowError(f"{where}: 'content' is {kind_name(content)}; text or a list of parts is allowed")


def text_parts(text: str, where: str, media: Media) -> list[Part]:
    """Text and, where a placeholder stands, the row's next medium of that kind."""
    if not is_well_formed(text):
        raise RowError(f"{where}: its text holds half of a surrogate pair, which is no character")
    parts: list[Part] = []
    for i, piece in enumerate(_PLACEHOLDER.split(text)):
        if i % 2:
            parts += media.take(cast(MediaKind, piece))
        elif piece:
            parts.append(Text(piece))
    return parts


def _part(value: Any, where: str, media: Media) -> list[Part]:
    """One element of a content list: text, or a medium in any of the usual spellings."""
    if isinstance(value, str):
        return text_parts(value, where, media)
    if not isinstance(value, Mapping):
        raise RowError(f"{where}: a part is {kind_name(value)}; text or an object is allowed")
    kind = value.get("type")
    given = {key: v for key, v in value.items() if key != "type" and not missing(v)}
    kinds = [name for name in ("text", *PARTS) if not given.keys().isdisjoint(_spellings(name))]
    if len(kinds) > 1:
        raise RowError(f"{where}: a part with {' and '.join(kinds)}: give each a part of its own")
    if kind in ("text", "input_text") or (kind is None and kinds == ["text"]):
        text = value.get("text")
        if kinds not in ([], ["text"]) or not isinstance(text, str):
            raise RowError(f"{where}: 'text' of a part is {kind_name(text)}; text is allowed")
        return text_parts(text, where, media)
    for name in PARTS:
        if kind in _spellings(name) or (kind is None and kinds == [name]):
            if kinds == ["text"]:
                raise RowError(f"{where}: a part of type {kind!r} with text: give it a part of its own")
            if given.keys() <= _NO_MEDIUM:
                return media.take(name)
            return [media.part(name, given, f"{where}: {name}")]
    raise RowError(f"{where}: unknown part of type {kind!r}; allowed are text, {', '.join(PARTS)}")


def _spellings(name: str) -> tuple[str, ...]:
    return (name, f"{name}_url", f"input_{name}")


# --- tools --------------------------------------------------------------------------------------------------------


def _result(parts: Sequence[Part], id: Any, where: str) -> ToolResult:
    if not missing(id) and not isinstance(id, str):
        raise RowError(f"{where}: 'tool_call_id' is {kind_name(id)}; text is allowed")
    return ToolResult(cast("tuple[Text | MediaPart, ...]", tuple(parts)), id or "")


def _calls(value: Any, where: str) -> list[ToolCall]:
    """Tool calls as OpenAI writes them, ``{"id", "function": {"name", "arguments"}}``, or without the inner object."""
    calls = value if isinstance(value, list) else [value]
    return [_call(call, f"{where}: tool call {i}") for i, call in enumerate(calls, 1)]


def _call(value: Any, where: str) -> ToolCall:
    if not isinstance(value, Mapping):
        raise RowError(f"{where} is {kind_name(value)}; an object with 'function' is allowed")
    function = value["function"] if isinstance(value.get("function"), Mapping) else value
    name, arguments, id = function.get("name"), function.get("arguments"), value.get("id")
    if not isinstance(name, str) or not name:
        raise RowError(f"{where}: its 'name' is {kind_name(name) if name != '' else 'empty'}; a tool's name is needed")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: 'arguments'")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise RowError(f"{where}: 'arguments' is {kind_name(arguments)}; an object, or its JSON text, is allowed")
    if not is_well_formed(json.dumps([name, dict(arguments)], ensure_ascii=False, default=str)):
        raise RowError(f"{where}: holds half of a surrogate pair, which is no character")
    if not missing(id) and not isinstance(id, str):
        raise RowError(f"{where}: 'id' is {kind_name(id)}; text is allowed")
    return ToolCall(name, dict(arguments), id or "")


def tools_of(value: Any) -> list[dict[str, Any]]:
    """A list of tools, or its JSON text, checked: each is an object with a name. Raises RowError."""
    if isinstance(value, str):
        value = _json(value, "'tools'")
    if not isinstance(value, list):
        raise RowError(f"'tools' is {kind_name(value)}; a list of objects, or its JSON text, is allowed")
    for i, tool in enumerate(value, 1):
        described = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = described.get("name") if isinstance(described, Mapping) else None
        if not isinstance(name, str) or not name:
            found = "an object without a name" if isinstance(tool, Mapping) else kind_name(tool)
            raise RowError(f"tool {i} is {found}; an object with 'name', or with 'function' that has one, is allowed")
    return value


def _json(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        said = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply or too long a number"
        raise RowError(f"{where} is not JSON ({said}): {short(text, 80)!r}") from error
