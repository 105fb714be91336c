"""Templates: text files with named places, filled with what is shown of a play."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

from relax_core.errors import ConfigError, nearest
from relax_core.types import Message, Part, Role, Text

Mode = Literal["rubric", "pairwise"]

REQUIRED: Mapping[Mode, tuple[str, ...]] = {"rubric": ("reply",), "pairwise": ("reply_a", "reply_b")}
PLACES: Mapping[Mode, tuple[str, ...]] = {
    mode: (*REQUIRED[mode], "task", "reference", "criteria", "worst", "best") for mode in get_args(Mode)
}
"""What a template of each mode may name; ``REQUIRED``: what it must."""

_ROLE = re.compile(r"^\[(system|user|assistant)\]\n", re.MULTILINE)
_BLOCK = re.compile(r"^\{\{#(\w+)\}\}\n(.*?)^\{\{/\1\}\}(?:\n|\Z)", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"\{\{([^{}]*)\}\}")
_TAG = re.compile(r"</?([A-Za-z][\w-]*)>")


@dataclass(frozen=True, slots=True)
class Template:
    """``[system]`` and ``[user]`` on lines of their own begin messages; ``{{place}}`` is filled, and what stands
    between the lines ``{{#place}}`` and ``{{/place}}`` is there only if the place has something in it."""

    messages: tuple[tuple[Role, str], ...]
    marks: frozenset[str]
    """The names in ``<name>`` and ``</name>``, by which the judge knows what is whose."""

    @classmethod
    def read(cls, mode: Mode, path: Path | None) -> Template:
        """The file's, or the built-in one. Raises ConfigError."""
        if path is None:
            return cls.of(files(__package__).joinpath("templates", f"{mode}.txt").read_text("utf-8"), mode, mode)
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"reward genrm: template: {path} cannot be read: {error}") from error
        return cls.of(text, mode, str(path))

    @classmethod
    def of(cls, text: str, mode: Mode, name: str) -> Template:
        """``name``: how errors call it."""
        where = f"reward genrm: template {name}"
        begin, *parts = _ROLE.split(text.replace("\r\n", "\n"))
        if begin.strip() or not parts:
            raise ConfigError(f"{where}: begin it with a line [system] or [user]")
        messages = tuple(zip(parts[::2], (body.strip("\n") + "\n" for body in parts[1::2]), strict=True))
        bodies = "".join(body for _, body in messages)
        named = {match[1].strip().lstrip("#/") for match in _PLACE.finditer(bodies)}
        for place in sorted(named - set(PLACES[mode])):
            near = nearest(place, PLACES[mode]) or f"; there are {', '.join(PLACES[mode])}"
            raise ConfigError(f"{where}: there is no place {{{{{place}}}}} in mode {mode}{near}")
        for place in REQUIRED[mode]:
            if f"{{{{{place}}}}}" not in bodies:
                raise ConfigError(f"{where}: mode {mode} needs the place {{{{{place}}}}}: put it in")
        if re.search(r"\{\{[#/]", _BLOCK.sub(r"\2", bodies)):
            raise ConfigError(f"{where}: {{{{#place}}}} and {{{{/place}}}} come in pairs, each on a line of its own")
        return cls(messages, frozenset(_TAG.findall(bodies)))  # type: ignore[arg-type]

    def filled(self, places: Mapping[str, Sequence[Part]]) -> tuple[Message, ...]:
        """Messages with what each place holds, media in their places. An empty sequence: there is nothing."""
        return tuple(Message(role, tuple(_filled(body, places))) for role, body in self.messages)


def _filled(body: str, places: Mapping[str, Sequence[Part]]) -> list[Part]:
    body = _BLOCK.sub(lambda block: block[2] if places[block[1]] else "", body)
    found: list[Part] = []
    for i, piece in enumerate(_PLACE.split(body.rstrip("\n"))):
        found += places[piece.strip()] if i % 2 else [Text(piece)]
    return joined(found)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Text) and found and isinstance(found[-1], Text):
            found[-1] = Text(found[-1].text + part.text)
        elif not (isinstance(part, Text) and not part.text):
            found.append(part)
    return found
