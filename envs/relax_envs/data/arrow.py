"""Rows of Arrow files, as ``datasets`` saves them: mapped into memory, so that any row costs about the same."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.errors import DataError
from relax_envs.data.parquet import arrow, columns_of, one_line
from relax_envs.data.source import Column, Rows
from relax_envs.data.values import plain


class ArrowRows(Rows):
    """The rows of one file, in Arrow's stream or file format. Raises DataError for another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches = batches_of(path)
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self._columns = columns_of(self._batches[0].schema) if self._batches else {}
        self._names = list(self._columns)

    @property
    def columns(self) -> Mapping[str, Column] | None:
        return self._columns

    def select(self, columns: Collection[str]) -> None:
        self._names = [name for name in self._columns if name in columns]

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> tuple[Path, int]:
        return self.path, index + 1

    def row(self, index: int) -> dict[str, Any]:
        place = bisect_right(self._starts, index) - 1
        return self._row(self._batches[place].select(self._names), index - self._starts[place])

    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        heads = {name if name in self._columns else name.partition(".")[0] for name in columns}
        for batch in self._batches:
            chosen = batch.select([name for name in self._columns if name in heads])
            yield from (self._row(chosen, i) for i in range(batch.num_rows))

    def _row(self, batch: Any, index: int) -> dict[str, Any]:
        try:
            return {name: plain(batch.column(i)[index].as_py()) for i, name in enumerate(batch.schema.names)}
        except arrow().ArrowException as error:
            raise ValueError(f"cannot be read: {one_line(error)}") from error


def batches_of(path: Path) -> list[Any]:
    """The record batches of a file; their data stay in the file until they are looked at."""
    pa = arrow()
    try:
        with pa.memory_map(str(path)) as file:
            try:
                return list(pa.ipc.open_stream(file))
            except pa.ArrowInvalid:
                file.seek(0)
                reader = pa.ipc.open_file(file)
                return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Arrow file: {one_line(error)}") from error
