"""Media of a row: from a path, an address, a data URI, bytes, or an object with one of them, to a part of a message."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from relax_core.types import Audio, Image, MediaKind, MediaPart, Part, Source, Video
from relax_envs.data.fetch import Fetcher
from relax_envs.data.values import RowError, kind_name, missing, short

PARTS: dict[MediaKind, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}

SETTINGS = frozenset(
    {"fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"}
    | {"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"}
)
"""Keys by which some data sets say how a medium is to be decoded."""

_DATA_URI = re.compile(r"data:([^,]*),", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_INLINE = ("bytes", "base64", "data")
_PLACES = ("path", "url")


class Media:
    """The media that a row lists, handed out in order to the placeholders of its messages.

    Raises RowError for one that is not there or cannot be understood.
    """

    def __init__(self, listed: Mapping[MediaKind, Any], folder: Path, fetcher: Fetcher) -> None:
        self.folder, self.fetcher = folder, fetcher
        self.listed: dict[MediaKind, list[MediaPart]] = {}
        self.used = dict.fromkeys(PARTS, 0)
        for kind in PARTS:
            value = listed.get(kind)
            values = value if isinstance(value, list) else [] if missing(value) else [value]
            several = len(values) > 1
            self.listed[kind] = [
                self.part(kind, source, f"{kind} {i}" if several else kind) for i, source in enumerate(values, 1)
            ]

    def take(self, kind: MediaKind) -> list[Part]:
        """The next medium of a kind; nothing when there is none left (``check`` tells)."""
        place = self.used[kind]
        self.used[kind] += 1
        return list(self.listed[kind][place : place + 1])

    def check(self) -> None:
        """Raises RowError unless there are as many placeholders as media, of each kind."""
        for kind, used in self.used.items():
            if used != len(self.listed[kind]):
                raise RowError(f"{used} <{kind}> in the messages, but {len(self.listed[kind])} in '{kind}s'")

    def part(self, kind: MediaKind, value: Any, where: str = "") -> MediaPart:
        """The medium that a value stands for. ``where``: what to call it in errors."""
        return PARTS[kind](self._source(kind, value, where or kind))

    def _source(self, kind: MediaKind, value: Any, where: str, depth: int = 0) -> Source:
        if isinstance(value, bytes) and value:
            return value
        if isinstance(value, str) and value:
            return self._located(value, where)
        if isinstance(value, Mapping) and value and depth < 4:
            return self._of_object(kind, value, where, depth)
        raise RowError(f"{where}: {'empty' if value in (b'', '') else kind_name(value)}; a path is allowed")

    def _of_object(self, kind: MediaKind, value: Mapping[str, Any], where: str, depth: int) -> Source:
        if settings := sorted(SETTINGS & {key for key, v in value.items() if not missing(v)}):
            raise RowError(f"{where}: {settings[0]!r} of a row is not heeded; set it for the whole run in modalities")
        for key in _INLINE:
            if not missing(value.get(key)):
                return unpacked(value[key], where)
        nested = [kind, f"{kind}_url", f"input_{kind}", "source"]
        given = [key for key in (*_PLACES, *nested) if not missing(value.get(key))]
        if len(given) == 1:
            return self._source(kind, value[given[0]], where, depth + 1)
        if given:
            raise RowError(f"{where}: both {' and '.join(map(repr, given))}: give one of them")
        keys = ", ".join(map(repr, value)) or "nothing"
        raise RowError(f"{where}: an object with {short(keys)}; 'path', 'url' or 'bytes' is needed, and not null")

    def _located(self, text: str, where: str) -> Source:
        """A path relative to the folder, ``file://``, a data URI or an address."""
        if (content := data_uri(text, where)) is not None:
            return content
        scheme = _SCHEME.match(text)
        if scheme and scheme.group().lower() != "file://":
            try:
                return self.fetcher.get(text)
            except RowError as error:
                raise RowError(f"{where} {short(text)}: {error}") from error
        name = text[scheme.end() :] if scheme else text
        path = self.folder / name
        try:
            if scheme and not path.is_file():
                path = self.folder / unquote(re.sub("^localhost(?=/)", "", name))
            if path.is_file():
                return path
            problem = "a folder, not a file" if path.is_dir() else "no such file"
        except (OSError, ValueError):  # too long for a name, or with a character that no name has
            problem = (
                "no such file; is it base64? write {'bytes': ...}, or a data URI" if len(name) > 255 else "no path"
            )
        raise RowError(f"{where} {short(str(path))}: {problem}")


def data_uri(text: str, where: str) -> bytes | None:
    """What a data URI holds; None for any other text."""
    match = _DATA_URI.match(text)
    if match is None:
        return None
    head, body = match.group(1), text[match.end() :]
    if head.lower().rpartition(";")[2].strip() == "base64":
        return unpacked(unquote(body) if "%" in body else body, where)
    if content := unquote_to_bytes(body):
        return content
    raise RowError(f"{where}: a data URI without content")


def unpacked(value: Any, where: str) -> bytes:
    """Bytes as they are, as base64 text or as a list of numbers."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        try:
            return bytes(value)
        except (TypeError, ValueError):
            raise RowError(f"{where}: a list that is not of bytes, numbers from 0 to 255") from None
    if not isinstance(value, str):
        raise RowError(f"{where}: its bytes are {kind_name(value)}; bytes or base64 text are allowed")
    if (content := data_uri(value, where)) is not None:
        return content
    try:
        content = base64.b64decode(
            "".join(value.split()) if value[-1:].isspace() or "\n" in value else value, validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{where}: not base64: {error}") from error
    if not content:
        raise RowError(f"{where}: empty")
    return content
