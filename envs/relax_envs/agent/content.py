"""Messages as OpenAI's clients write them, and as Relax has them: text, media inside the request, tool calls.

Whatever would not reach the model is refused, never dropped. Media come as ``data:`` addresses or as base64: the
endpoint fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.types import Audio, Image, Message, Part, Role, Text, ToolCall, ToolResult, Video
from relax_envs.agent.errors import bad
from relax_envs.data.media import PARTS, data_uri, unpacked
from relax_envs.data.values import RowError, is_well_formed, kind_name

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KEYS = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}
"""Besides role and content. The name of a tool's message is that of the call which its id names."""
_KINDS = ("text", "image_url", "input_audio", "video_url")


def messages_of(value: Any) -> list[Message]:
    """Raises ApiError, with the place in the request."""
    if not isinstance(value, list) or not value:
        raise bad("messages", f"{_name(value)}; a list of messages is allowed")
    found = [_message(item, f"messages[{i}]") for i, item in enumerate(value)]
    if found[-1].role == "assistant":
        raise bad(f"messages[{len(found) - 1}].role", "assistant; the policy goes on from no beginning of its reply")
    return found


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise bad(where, f"{_name(item)}; an object is allowed")
    role = item.get("role")
    if role not in _ROLES:
        raise bad(f"{where}.role", f"{role!r}; allowed are {', '.join(_ROLES)}")
    known = {"role", "content"} | _KEYS.get(role, set())
    for key, given in item.items():
        if key not in known and given not in (None, [], {}):
            raise bad(f"{where}.{key}", "it would not reach the model; leave it out")
    parts = _content(item.get("content"), f"{where}.content", optional=bool(item.get("tool_calls")))
    if role == "assistant":
        return Message("assistant", (*_texts(parts, where), *_calls(item.get("tool_calls"), f"{where}.tool_calls")))
    if role == "tool":
        return Message("tool", (ToolResult(tuple(parts), _text(item.get("tool_call_id"), f"{where}.tool_call_id")),))
    return Message(_ROLES[role], tuple(parts))


# --- content ----------------------------------------------------------------------------------------------------------


def _content(value: Any, where: str, optional: bool) -> list[Text | Image | Audio | Video]:
    if isinstance(value, str):
        return [Text(_text(value, where))]
    if isinstance(value, list) and value:
        return [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if optional and not value:
        return []
    raise bad(where, f"{_name(value)}; text or a list of parts is allowed")


def _texts(parts: Sequence[Part], where: str) -> list[Text]:
    found = [part for part in parts if isinstance(part, Text)]
    if len(found) != len(parts):
        raise bad(f"{where}.content", "media in an assistant's message; text is allowed")
    return found


def _part(part: Any, where: str) -> Text | Image | Audio | Video:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS:
        raise bad(f"{where}.type", f"{kind!r}; allowed are {', '.join(_KINDS)}")
    value = part.get(kind)
    if kind == "text":
        return Text(_text(value, f"{where}.text"))
    name = "data" if kind == "input_audio" else "url"
    where = f"{where}.{kind}.{name}"
    given = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(given, str):
        raise bad(where, f"{_name(given)}; text is allowed")
    try:
        if kind == "input_audio":
            return Audio(unpacked(given, kind))
        content = data_uri(given, kind)
    except RowError as error:
        raise bad(where, str(error)) from error
    if content is None:
        raise bad(where, "no data: address; nothing is fetched, so put the medium itself into the request")
    return PARTS["image" if kind == "image_url" else "video"](content)


# --- tool calls -------------------------------------------------------------------------------------------------------


def _calls(value: Any, where: str) -> list[ToolCall]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad(where, f"{_name(value)}; a list is allowed")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad(f"{where}.function", f"{_name(function)}; an object is allowed")
    given = _text(function.get("arguments"), f"{where}.function.arguments")
    try:
        arguments = json.loads(given)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad(f"{where}.function.arguments", "the JSON text of an object is allowed")
    name = _text(function.get("name"), f"{where}.function.name")
    return ToolCall(name, arguments, _text(call.get("id", ""), f"{where}.id"))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad(where, f"{_name(value)}; text is allowed")
    if not is_well_formed(value):
        raise bad(where, "it holds half of a surrogate pair, which is no character")
    return value


def _name(value: Any) -> str:
    return "missing" if value is None else "empty" if value in ([], "") else kind_name(value)
