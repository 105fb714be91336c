"""A value of the settings of columns, found in a row: a column, what is inside of one, or a text with columns in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_core.errors import nearest
from relax_envs.data.columns import split_text
from relax_envs.data.source import Column
from relax_envs.data.values import RowError, kind_name


class Lookup:
    """``where``: the setting's name, for errors. ``literal``: a text without braces stands for itself."""

    def __init__(self, text: str, where: str, literal: bool = False) -> None:
        self.text, self.where = text, where
        self.pieces = split_text(text) if literal or "{" in text or "}" in text else None
        self.names = [text] if self.pieces is None else [name for name, hole in self.pieces if hole]

    def find(self, row: Mapping[str, Any], special: Mapping[str, Callable[[], str]] = {}) -> Any:
        """The value, None where there is none. ``special``: names that are no columns. Raises RowError."""
        if self.pieces is None:
            return find(row, self.text)
        return "".join(self._words(row, name, special) if hole else name for name, hole in self.pieces)

    def _words(self, row: Mapping[str, Any], name: str, special: Mapping[str, Callable[[], str]]) -> str:
        if name in special:
            return special[name]()
        value = find(row, name)
        if value is None or value != value:
            near = "" if head(name, row) in row else nearest(name, row)
            raise RowError(f"{self.where} needs {name!r}, which this row does not have{near}")
        return in_words(value, f"{self.where}: {name!r}")


def in_words(value: Any, where: str) -> str:
    """Text, a number or a list of them, a line each. Raises RowError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # whole numbers beside nulls are floats in many a file
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list) and not any(isinstance(v, list | Mapping) for v in value):
        return "\n".join(in_words(v, where) for v in value)
    raise RowError(f"{where} is {kind_name(value)}; text, a number or a list of them can be put into a text")


def find(row: Mapping[str, Any], name: str) -> Any:
    """A column, or what a dotted path leads to; None where there is nothing. Raises RowError where no path can lead."""
    if name in row:
        return row[name]
    steps = name.split(".")
    for i in range(len(steps) - 1, 0, -1):
        if (head := ".".join(steps[:i])) in row:
            return _walk(row[head], steps[i:], head)
    return None


def _walk(value: Any, steps: list[str], where: str) -> Any:
    for step in steps:
        if value is None or value != value:
            return None
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list):
            if not step.lstrip("-").isdigit():
                raise RowError(f"{where!r} is a list; {step!r} is no place in one")
            value = value[int(step)] if -len(value) <= int(step) < len(value) else None
        else:
            raise RowError(f"{where!r} is {kind_name(value)}; there is no {step!r} in it")
        where = f"{where}.{step}"
    return value


def head(name: str, columns: Mapping[str, Any]) -> str:
    """The column in which a path begins."""
    steps = name.split(".")
    heads = (".".join(steps[:i]) for i in range(len(steps), 0, -1))
    return next((h for h in heads if h in columns), steps[0])


def lacking(name: str, columns: Mapping[str, Column]) -> str:
    """What is not there of a path; empty when it may lead somewhere."""
    column = head(name, columns)
    if column not in columns:
        return f"no column {column!r}{nearest(column, columns)}"
    here, where = columns[column], column
    for step in filter(None, name[len(column) + 1 :].split(".")):
        if here.fields is None:
            return ""
        if step not in here.fields:
            return f"column {where!r} has no {step!r}{nearest(step, here.fields)}"
        here, where = here.fields[step], f"{where}.{step}"
    return ""
