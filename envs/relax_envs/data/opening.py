"""Opening a data set: its files found, their columns checked, every row looked at once for its id."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_core.errors import DataError
from relax_envs.data.arrow import ArrowRows, batches_of
from relax_envs.data.blocks import BlockCache
from relax_envs.data.files import Files, find
from relax_envs.data.json_lines import JsonArray, JsonLines, json_rows
from relax_envs.data.mapping import Mapper
from relax_envs.data.parquet import ParquetRows
from relax_envs.data.source import Column, Joined, Picked, Rows


def open_rows(path: Path, split: str | None, cache_bytes: int) -> Rows:
    """The rows behind a path. Raises DataError when nothing is there, it cannot be read, or it has no row."""
    files = find(path, split)
    cache = BlockCache(cache_bytes)
    openers: dict[str, Callable[[Path], Rows]] = {
        "json lines": JsonLines,
        "json": json_rows,
        "parquet": lambda file: ParquetRows(file, cache),
        "arrow": ArrowRows,
    }
    parts = [openers[files.format](file) for file in files.paths]
    rows = parts[0] if len(parts) == 1 else Joined(parts)
    if files.indices:
        rows = Picked(rows, _indices(files))
    if not len(rows):
        advice = ": write one JSON object a line" if files.format == "json lines" else ""
        raise DataError(f"{path}: the data set is empty{advice}")
    return rows


def _indices(files: Files) -> array[int]:
    found: array[int] = array("Q")
    for path in files.indices:
        for batch in batches_of(path):
            found.extend(batch.column(0).to_pylist())
    return found


class Scan:
    """What one pass over the rows of a data set shows: which columns there are, and which id each row has.

    ``named``: turns a row's index and own id (None: it has none) into the id of its task. Raises DataError when a
    column is asked for that is not there.
    """

    def __init__(self, rows: Rows, mapper: Mapper, where: str, named: Callable[[int, str | None], str]) -> None:
        self.hashes: array[int] = array("q")
        """Of the ids of all rows; empty when no row has one of its own."""
        self.unreadable: array[int] = array("Q")
        """Rows that cannot be read, or whose id is of a wrong kind."""
        columns = _checked(rows, mapper, where)
        names = [] if columns is None else mapper.for_ids(columns)
        if columns is not None and not names:
            return
        try:
            keys, own = self._look(rows, mapper, names, named, columns is None)
        except OSError as error:
            raise DataError(f"{where}: cannot be read: {error}") from error
        if columns is None and keys:
            mapper.check({key: Column() for key in keys}, where)
        if not own:
            self.hashes = array("q")

    def _look(
        self, rows: Rows, mapper: Mapper, names: list[str], named: Callable[[int, str | None], str], all_keys: bool
    ) -> tuple[dict[str, None], bool]:
        """The columns that rows have (where ``all_keys``), and whether any has an id of its own."""
        own, keys = False, dict[str, None]()
        for index, row in enumerate(rows.scan(names)):
            id = None
            try:
                if row is None:
                    raise ValueError
                if all_keys and not row.keys() <= keys.keys():
                    keys.update(dict.fromkeys(row))
                id = mapper.id(row)
            except ValueError:
                self.unreadable.append(index)
            own |= id is not None
            self.hashes.append(hash(named(index, id)))
        return keys, own


def _checked(rows: Rows, mapper: Mapper, where: str) -> dict[str, Column] | None:
    """The columns that all files have, None where rows say for themselves. Those to read are chosen."""
    for part in rows.parts if isinstance(rows, Joined) else [rows]:
        if (columns := part.columns) is not None and len(part):
            mapper.check(columns, str(part.place(0)[0]))
    if rows.columns is None:
        return None
    columns = {}
    for part in rows.parts if isinstance(rows, Joined) else [rows]:
        columns |= part.columns or {}
    rows.select(mapper.needed(columns))
    return columns


def default_ids(rows: Rows) -> Callable[[int], str]:
    """Ids for rows without one: the line's number, and which of several files it is in."""
    paths = [part.place(0)[0] for part in rows.parts if len(part)] if isinstance(rows, Joined) else []
    numbers = _numbers(rows)
    if len(paths) < 2:
        return lambda index: str(numbers(index))
    names = _names(paths)

    def named(index: int) -> str:
        return f"{names[rows.place(index)[0]]}:{numbers(index)}"

    return named


def _numbers(rows: Rows) -> Callable[[int], int]:
    """The line's number; of an array that has several elements in a line, the element's."""
    parts = rows.parts if isinstance(rows, Joined) else [rows]
    if all(part.one_a_line for part in parts if isinstance(part, JsonArray)):
        return lambda index: rows.place(index)[1]
    return lambda index: index + 1


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """Short names of files: their paths below the folder that holds them all."""
    folder = os.path.commonpath([path.parent.absolute() for path in paths])
    return {path: os.path.relpath(path.absolute(), folder) for path in paths}
