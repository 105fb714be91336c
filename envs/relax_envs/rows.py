"""From a row of data (messages or a prompt, an answer, media) to a Task. Pure, but for looking whether files exist."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from relax_core.errors import nearest
from relax_core.types import Audio, Image, MediaKind, MediaPart, Message, Part, Role, Task, Text, Video

_KEYS = ("id", "messages", "prompt", "answer", "images", "audios", "videos", "metadata")
_PARTS: dict[MediaKind, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}
_ROLES = get_args(Role)
_PLACEHOLDER = re.compile(r"<(image|audio|video)>")
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class RowError(ValueError):
    """Why a row is no task: one line, without the file and the line's number."""


def task_of(row: Mapping[str, Any], folder: Path, id: str, need_answer: bool = True) -> Task:
    """The task of a row; media paths are relative to ``folder``. Keys that are not known become metadata.

    ``metadata``, ``answer`` and lists of media that are null, NaN or empty count as missing. Raises RowError.
    """
    media = _Media(row, folder)
    messages = _messages(row, media)
    media.check()
    if empty := [i for i, message in enumerate(messages, 1) if not message.parts]:
        raise RowError(f"message {empty[0]}: 'content' is empty")
    if messages[-1].role == "assistant":
        raise RowError("the last message is the assistant's: nothing is asked; put the right reply into 'answer'")
    extras = {key: value for key, value in row.items() if key not in _KEYS}
    answer = None if _missing(row.get("answer")) else row["answer"]
    if answer is None and need_answer:
        raise RowError(f"no 'answer'{nearest('answer', extras)} (need_answer: false allows it)")
    metadata = {} if _missing(row.get("metadata")) else row["metadata"]
    if not isinstance(metadata, Mapping):
        raise RowError(f"'metadata' is {_name(metadata)}; an object is allowed")
    return Task(id, messages, answer, {**extras, **metadata})


def row_id(row: Mapping[str, Any], number: int) -> str:
    """The row's own ``id``, else the number of its line."""
    id = row.get("id")
    if _missing(id):
        return str(number)
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise RowError(f"'id' is {id!r}; text or a whole number is allowed")
    return str(id)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


# --- messages ----------------------------------------------------------------------


def _messages(row: Mapping[str, Any], media: _Media) -> tuple[Message, ...]:
    given = [key for key in ("messages", "prompt") if not _missing(row.get(key))]
    if len(given) != 1:
        found = "both 'messages' and 'prompt'" if given else "neither 'messages' nor 'prompt'"
        raise RowError(f"{found}{'' if given else nearest('messages', row)}: give one of them")
    value = row[given[0]]
    if isinstance(value, str) and given == ["prompt"]:
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        found = "empty" if value == [] else _name(value)
        raise RowError(f"{given[0]!r} is {found}; a list of messages is allowed")
    return tuple(_message(item, f"message {i}", media) for i, item in enumerate(value, 1))


def _message(item: Any, where: str, media: _Media) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{where} is {_name(item)}; an object with 'role' and 'content' is allowed")
    role = item.get("role")
    if role not in _ROLES:
        raise RowError(f"{where}: role {role!r}; allowed are {', '.join(_ROLES)}")
    read = ("role", "content", "name")
    unread = sorted(key for key, value in item.items() if key not in read and not _missing(value))
    if unread:
        raise RowError(f"{where}: {', '.join(map(repr, unread))} cannot be used here; 'role' and 'content' are allowed")
    content = item.get("content")
    if isinstance(content, str):
        parts = _text(content, media)
    elif isinstance(content, list):
        parts = [part for value in content for part in _part(value, where, media)]
    else:
        raise RowError(f"{where}: 'content' is {_name(content)}; text or a list of parts is allowed")
    return Message(cast(Role, role), tuple(parts))


def _text(text: str, media: _Media) -> list[Part]:
    """Text and, where a placeholder stands, the row's next medium of that kind."""
    parts: list[Part] = []
    for i, piece in enumerate(_PLACEHOLDER.split(text)):
        if i % 2:
            parts += media.take(piece)
        elif piece:
            parts.append(Text(piece))
    return parts


def _part(value: Any, where: str, media: _Media) -> list[Part]:
    """One element of a content list: text, or a medium in any of the usual spellings."""
    if isinstance(value, str):
        return _text(value, media)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("text", "input_text") and isinstance(value.get("text"), str):
        return _text(value["text"], media)
    for name in _PARTS:
        if kind in (name, f"{name}_url", f"input_{name}"):
            sources = [v for k, v in value.items() if k in (kind, name, "path", "url", "data") and not _missing(v)]
            return [media.part(name, sources[0])] if sources else media.take(name)
    raise RowError(f"{where}: unknown part of type {kind!r}; allowed are text, {', '.join(_PARTS)}")


# --- media ----------------------------------------------------------------------


class _Media:
    """The media that a row lists, handed out in order to the placeholders of its messages."""

    def __init__(self, row: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.listed: dict[str, list[MediaPart]] = {}
        self.used = dict.fromkeys(_PARTS, 0)
        for kind in _PARTS:
            value = row.get(f"{kind}s")
            value = [] if _missing(value) else value
            if not isinstance(value, list):
                raise RowError(f"'{kind}s' is {_name(value)}; a list of paths is allowed")
            self.listed[kind] = [self.part(kind, source) for source in value]

    def take(self, kind: str) -> list[Part]:
        """The next medium of a kind; nothing when there is none left (``check`` tells)."""
        place = self.used[kind]  # type: ignore[index]
        self.used[kind] += 1  # type: ignore[index]
        return list(self.listed[kind][place : place + 1])

    def check(self) -> None:
        """Raises RowError unless there are as many placeholders as media, of each kind."""
        for kind, used in self.used.items():
            if used != len(self.listed[kind]):
                raise RowError(f"{used} <{kind}> in the messages, but {len(self.listed[kind])} in '{kind}s'")

    def part(self, kind: MediaKind, source: Any) -> MediaPart:
        """A medium from a path, a data URL, or an object that holds one of these."""
        if isinstance(source, Mapping):
            found = [source[k] for k in ("path", "url", "data", "bytes") if not _missing(source.get(k))]
            raw = "path" not in source and "url" not in source
            if len(found) == 1 and isinstance(found[0], str):
                return _PARTS[kind](_unpacked(found[0])) if raw else self.part(kind, found[0])
        if not isinstance(source, str) or not source:
            raise RowError(f"{kind}: {_name(source)}; a path is allowed")
        if match := _DATA_URL.match(source):
            return _PARTS[kind](_unpacked(source[match.end() :]))
        if (scheme := _SCHEME.match(source)) and scheme.group() != "file://":
            raise RowError(f"{kind} {source[:200]}: an address; download it and give the path")
        path = self.folder / source.removeprefix("file://")
        if not path.is_file():
            raise RowError(f"{kind} {path}: no such file")
        return _PARTS[kind](path)


def _unpacked(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RowError(f"media: not base64: {error}") from error
