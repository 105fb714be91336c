"""Which column of a data set is what: the settings, from a run file or from a file of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from relax_core.config import yaml
from relax_core.config.validation import validate
from relax_core.errors import ConfigError
from relax_core.interfaces import ComponentConfig

FIELDS = ("id", "prompt", "messages", "system", "answer", "choices", "images", "audios", "videos", "metadata", "tools")
"""Settings whose values name columns."""

_HOLE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")

Many = str | Annotated[tuple[str, ...], Field(min_length=1)]


class Columns(ComponentConfig):
    """A value names a column, or what is inside of one (``reward_model.ground_truth``, ``choices.0``), or is a text
    with columns in braces: ``"<video>{question}"``; ``{{`` is a brace. A list is put in line by line. A field that is
    not set takes the column of its own name; an empty text leaves it out although there is one.
    """

    prompt: str | None = None
    """One user message, or a list of messages."""
    messages: str | None = None
    """A conversation, as OpenAI or ShareGPT write it; default also the column ``conversations``."""
    system: str | None = None
    """Text of a system message before all others, the same for every row or with columns in braces."""
    answer: str | None = None
    """The right answer: text, a number, a list or an object."""
    answer_after: str | None = None
    """The answer is what follows the last of these marks, such as ``####``."""
    answer_pattern: str | None = None
    """The answer is the first group of the last match, such as ``<answer>(.*?)</answer>``."""
    choices: Many | None = None
    """A list, or one column for each choice. ``{choices}`` in a text gives lines "A. ...", the texts become metadata,
    and an answer that is a whole number, counted from 0, becomes its letter."""
    images: Many | None = None
    """A list, one image, or several columns; default also the column ``image``."""
    audios: Many | None = None
    """The same; default also the column ``audio``."""
    videos: Many | None = None
    """The same; default also the column ``video``."""
    metadata: Many | None = None
    """Only these columns become metadata, an object's items one by one; default: the column ``metadata`` so, and every
    column that has no other use, as it is. Bytes are left out."""
    tools: str | None = None
    """A list of tools, or its JSON text; kept as metadata ``tools``."""
    id: str | None = None
    """Of the row, unique in its source; default also the number of its line."""
    last_reply: Literal["error", "answer", "drop"] = "error"
    """Where a conversation ends with a reply: the row is bad, the reply is the answer, or it is left out."""
    function: str | None = None
    """``package.module:name`` or ``path/file.py:name``: makes another row (a dict) of one, first of all but ``id``."""

    @field_validator("messages", "answer_pattern")
    @classmethod
    def _alone(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Of two fields that say the same thing only one may be set."""
        other = {"messages": "prompt", "answer_pattern": "answer_after"}[str(info.field_name)]
        if value and info.data.get(other):
            raise ValueError(f"{other} and {info.field_name} are both set; keep one")
        return value

    @field_validator("answer_after")
    @classmethod
    def _a_mark(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("a mark such as '####' is needed")
        return value

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, value: str | None) -> str | None:
        try:
            groups = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"it has {groups} groups; one is needed, around the answer")
        return value

    @field_validator("function")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r".+:\w+", value):
            raise ValueError("write package.module:name, or path/file.py:name")
        return value

    @field_validator(*FIELDS)
    @classmethod
    def _braces(cls, value: Many | None, info: ValidationInfo) -> Many | None:
        for text in [value] if isinstance(value, str) else value or ():
            holes = any(hole for _, hole in split_text(text))
            if holes and info.field_name in ("messages", "choices", "metadata", "tools"):
                raise ValueError(f"{text!r} has columns in braces; name a column")
        return value


def split_text(text: str) -> list[tuple[str, bool]]:
    """The pieces of a text with columns in braces: (words, False), (column, True). Raises ValueError."""
    pieces: list[tuple[str, bool]] = []
    end = 0
    for hole in _HOLE.finditer(text):
        pieces.append((text[end : hole.start()], False))
        end = hole.end()
        if hole.group() in ("{", "}"):
            raise ValueError(f"{text!r}: a single {hole.group()!r}; write {hole.group() * 2!r} for the character")
        pieces.append((hole.group(1), True) if hole.group(1) else (hole.group()[0], False))
    return [*pieces, (text[end:], False)]


def read_columns(columns: Columns | Path | None) -> Columns:
    """The settings themselves, read from a YAML file where a path is given. Raises ConfigError."""
    if columns is None:
        return Columns()
    if isinstance(columns, Columns):
        return columns
    try:
        found = yaml.load(columns.read_text(encoding="utf-8-sig"), str(columns))
    except FileNotFoundError:
        raise ConfigError(
            f"{columns}: no such file (looked in {Path.cwd()}); it should say which column is what"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{columns}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{columns}: not a mapping such as 'prompt: question'")
    return validate(Columns, found, str(columns))
