"""From a row of a data set to its fields, by the settings that say which column is what."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_core.errors import DataError, nearest
from relax_core.types import MediaKind
from relax_envs.data.columns import FIELDS, Columns
from relax_envs.data.function import load_function
from relax_envs.data.lookup import Lookup, head, in_words, lacking
from relax_envs.data.media import PARTS
from relax_envs.data.messages import tools_of
from relax_envs.data.source import Column
from relax_envs.data.values import RowError, holds_bytes, kind_name, missing

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TALKS = ("messages", "prompt", "conversations")


@dataclass(slots=True)
class Fields:
    """What a row says. ``talk``: a conversation, or the text of one message, that came from ``talk_name``."""

    talk: Any
    talk_name: str
    system: str | None
    media: dict[MediaKind, Any]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Mapper:
    """Finds the fields of rows. Raises ConfigError for a function that cannot be imported."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._function = load_function(columns.function) if columns.function else None
        self._lookups = {name: self._lookups_of(name) for name in FIELDS}
        self._named = {name for lookups in self._lookups.values() for lookup in lookups for name in lookup.names}
        self._own = self._own_names()

    def _lookups_of(self, field: str) -> list[Lookup]:
        value = getattr(self.columns, field)
        texts = [value] if isinstance(value, str) else list(value or ())
        return [Lookup(text, f"{field!r}", literal=field == "system") for text in texts if text]

    def _own_names(self) -> dict[str, tuple[str, ...]]:
        """For each field that is not set: the columns that it takes, unless another field names them."""
        also = {f"{kind}s": (kind,) for kind in PARTS}
        names = {name: (name, *also.get(name, ())) for name in FIELDS if getattr(self.columns, name) is None}
        names.pop("choices", None)
        if self._lookups["prompt"] or self._lookups["messages"]:
            names.pop("prompt", None)
            names.pop("messages", None)
        elif "messages" in names:
            names["messages"] = ("messages", "conversations")
        taken = {head(name, {}) for name in self._named} | self._named
        return {name: tuple(c for c in columns if c not in taken) for name, columns in names.items()}

    # --- columns of a file --------------------------------------------------------------------------------------------

    def check(self, columns: Mapping[str, Column], where: str) -> None:
        """Raises DataError when a column that is asked for is not among those of a file."""
        for name, lookups in self._lookups.items():
            if self._function and name != "id":
                continue
            for column in (c for lookup in lookups for c in lookup.names):
                if column == "choices" and self._lookups["choices"] and name != "choices":
                    continue  # stands for the lines of choices
                if problem := lacking(column, columns):
                    raise DataError(f"{where}: columns.{name}: {problem}; there are {', '.join(columns) or 'none'}")

    def needed(self, columns: Mapping[str, Column]) -> list[str]:
        """Those to read of a file: all but those without a use, such as bytes that no field names."""
        if self._function:
            return list(columns)
        used = {head(name, columns) for name in self._named} | {c for own in self._own.values() for c in own}
        every = self.columns.metadata is None
        return [name for name, column in columns.items() if name in used or (every and not column.binary)]

    def for_ids(self, columns: Mapping[str, Column]) -> list[str]:
        """Those that ids are made of."""
        names = [name for lookup in self._lookups["id"] for name in lookup.names] or self._own.get("id", ())
        return [column for name in names if (column := head(name, columns)) in columns]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def id(self, row: Mapping[str, Any]) -> str | None:
        """The row's own id, None where it has none. Raises RowError for one that is neither text nor a whole number."""
        id = self._find("id", row)
        if missing(id):
            return None
        if isinstance(id, float) and id.is_integer():
            id = int(id)
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise RowError(f"'id' is {id!r:.60}; text or a whole number is allowed")
        return str(id)

    def fields(self, row: dict[str, Any]) -> Fields:
        """Raises RowError when the row lacks a field that it needs, or a field is of the wrong kind."""
        row = self._function(row) if self._function else row
        choices = self._choices(row)
        name, talk = self._talk(row, choices)
        media = {kind: self._media(f"{kind}s", row) for kind in PARTS}
        found = Fields(talk, name, self._system(row, choices), media)
        found.answer = self._answer(row, choices)
        found.metadata = self._metadata(row)
        if choices:
            found.metadata["choices"] = choices
        if not missing(tools := self._find("tools", row)):
            found.metadata["tools"] = tools_of(tools)
        return found

    def _find(self, field: str, row: Mapping[str, Any], choices: list[str] | None = None) -> Any:
        """The value of a field that has one, from where the settings say or from the columns of its own."""
        for lookup in self._lookups[field]:
            return lookup.find(row, {"choices": lambda: lettered(choices)} if choices is not None else {})
        return next((row[c] for c in self._own.get(field, ()) if not missing(row.get(c))), None)

    def _talk(self, row: Mapping[str, Any], choices: list[str]) -> tuple[str, Any]:
        for name in ("prompt", "messages"):
            if self._lookups[name]:
                value = self._find(name, row, self._given(choices))
                if missing(value):
                    text = self._lookups[name][0].text
                    near = "" if head(text, row) in row else nearest(text, row)
                    raise RowError(f"no {name!r}: {text!r} is not in this row, or empty{near}")
                return name, value
        own = [c for c in _TALKS if any(c in names for names in self._own.values())]
        given = [c for c in own if not missing(row.get(c))]
        if len(given) == 1:
            return given[0], row[given[0]]
        if given:
            raise RowError(f"both {' and '.join(map(repr, given))}: give one of them")
        if empty := [c for c in own if c in row]:
            found = "empty" if row[empty[0]] in ("", [], {}) else "null"
            text = ", or text," if empty[0] == "prompt" else ""
            raise RowError(f"{empty[0]!r} is {found}; a list of messages{text} is allowed")
        raise RowError(f"neither 'messages' nor 'prompt'{nearest('messages', row)}: give one of them")

    def _system(self, row: Mapping[str, Any], choices: list[str]) -> str | None:
        found = self._find("system", row, self._given(choices))
        if missing(found):
            return None
        if not isinstance(found, str):
            raise RowError(f"'system' is {kind_name(found)}; text is allowed")
        return found

    def _media(self, field: str, row: Mapping[str, Any]) -> Any:
        lookups = self._lookups[field]
        if len(lookups) < 2:
            return self._find(field, row)
        found: list[Any] = []
        for lookup in lookups:
            if not missing(value := lookup.find(row)):
                found += value if isinstance(value, list) else [value]
        return found

    # --- answers and choices ------------------------------------------------------------------------------------------

    def _given(self, choices: list[str]) -> list[str] | None:
        return choices if self._lookups["choices"] else None

    def _choices(self, row: Mapping[str, Any]) -> list[str]:
        lookups = self._lookups["choices"]
        values = [lookup.find(row) for lookup in lookups]
        if len(values) == 1 and isinstance(values[0], list):
            values = list(values[0])
        elif len(values) == 1 and not missing(values[0]):
            raise RowError(f"'choices' is {kind_name(values[0])}; a list of texts is allowed")
        while values and missing(values[-1]):
            values.pop()
        if len(values) > len(LETTERS):
            raise RowError(f"{len(values)} choices; {len(LETTERS)} are allowed, one for each letter")
        for i, value in enumerate(values, 1):
            if missing(value) or isinstance(value, list | Mapping):
                raise RowError(f"choice {i} is {'empty' if missing(value) else kind_name(value)}; text is allowed")
        return [in_words(value, f"choice {i}") for i, value in enumerate(values, 1)]

    def _answer(self, row: Mapping[str, Any], choices: list[str]) -> Any:
        answer = self._find("answer", row)
        if missing(answer):
            return None
        if holds_bytes(answer):
            raise RowError("'answer' is bytes; text, a number, a list or an object is allowed")
        if self.columns.answer_after is not None or self.columns.answer_pattern is not None:
            answer = self._cut_out(answer)
        whole = isinstance(answer, int) or (isinstance(answer, float) and answer.is_integer())
        if choices and whole and not isinstance(answer, bool):
            if not 0 <= answer < len(choices):
                raise RowError(f"'answer' is {int(answer)}, but the choices are counted from 0 to {len(choices) - 1}")
            return LETTERS[int(answer)]
        return answer

    def _cut_out(self, answer: Any) -> str:
        mark, pattern = self.columns.answer_after, self.columns.answer_pattern
        if not isinstance(answer, str):
            raise RowError(f"'answer' is {kind_name(answer)}; text with {mark or pattern!r} is needed")
        if mark is not None:
            _, found, rest = answer.rpartition(mark)
            groups = [rest] if found else []
        else:
            groups = re.findall(pattern or "", answer, re.DOTALL)
        if not groups or not groups[-1].strip():
            raise RowError(f"'answer' has {'nothing behind' if groups else 'no'} {mark or pattern!r}")
        return str(groups[-1].strip())

    # --- metadata -----------------------------------------------------------------------------------------------------

    def _metadata(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self.columns.metadata is not None:
            return self._chosen(row)
        used = {head(name, row) for name in self._named} | {c for own in self._own.values() for c in own}
        extras = {k: v for k, v in row.items() if k not in used and v is not None and v == v and not holds_bytes(v)}
        more = self._find("metadata", row)
        if not missing(more) and not isinstance(more, Mapping):
            raise RowError(f"'metadata' is {kind_name(more)}; an object is allowed")
        return {**extras, **(more or {})} if not missing(more) else extras

    def _chosen(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for lookup in self._lookups["metadata"]:
            value = lookup.find(row)
            if holds_bytes(value):
                raise RowError(f"'metadata': {lookup.text!r} is bytes; they cannot be metadata")
            if isinstance(value, Mapping):
                found.update(value)
            elif not missing(value):
                found[lookup.text.rpartition(".")[2]] = value
        return found


def lettered(choices: Collection[str] | None) -> str:
    """Lines such as ``A. Paris``. Raises RowError when there are none."""
    if not choices:
        raise RowError("'choices' is empty, and {choices} stands in a text")
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))
