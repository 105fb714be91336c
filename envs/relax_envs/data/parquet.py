"""Rows of a Parquet file: read in blocks of bounded size, of which a few are kept; never the whole file."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.errors import DataError
from relax_envs.data.blocks import BlockCache
from relax_envs.data.layout import Layout, Run, unpacked_bytes
from relax_envs.data.source import Column, Part, Rows
from relax_envs.data.values import plain

_SCANNED = 4096


def arrow() -> Any:
    """The package pyarrow. Raises DataError when it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError("Parquet and Arrow files need pyarrow: pip install 'relax-rl[data]'") from error
    return pyarrow


class ParquetRows(Rows):
    """The rows of one file, in blocks: a row group that is small beside the cache, or a part of a larger one.

    Parts of a row group are unpacked one after the other from an open stream; going back in it starts again at the
    group's first row. Raises DataError for a file that is no Parquet.
    """

    def __init__(self, path: Path, cache: BlockCache) -> None:
        self.path, self.cache = path, cache
        arrow()
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                self._metadata, self._schema = file.metadata, file.schema_arrow
            self._stamp = _stamp(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: not a readable Parquet file: {one_line(error)}") from error
        self._names: list[str] = list(dict.fromkeys(self._schema.names))
        self._layout: Layout | None = None
        self._lock = threading.Lock()

    @property
    def columns(self) -> Mapping[str, Column] | None:
        return columns_of(self._schema)

    def select(self, columns: Collection[str]) -> None:
        self._names = [name for name in self._schema.names if name in columns]

    def __len__(self) -> int:
        return int(self._metadata.num_rows)

    def place(self, index: int) -> tuple[Path, int]:
        return self.path, index + 1

    def row(self, index: int) -> dict[str, Any]:
        import pyarrow as pa

        if not self._names:
            return {}
        try:
            run, place = self._laid_out().find(index)
            part = run.parts[place]
            block = self.cache.get((self.path, part.start), lambda: self._read(run, place))
            [row] = block.slice(index - part.start, 1).to_pylist()
        except pa.ArrowException as error:
            raise ValueError(f"cannot be read: {one_line(error)}") from error
        return plain(row)  # type: ignore[no-any-return]

    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        """Only these columns are read. Raises DataError for a damaged file."""
        import pyarrow as pa

        if not columns:
            yield from ({} for _ in range(len(self)))
            return
        try:
            with self._open() as file:
                for batch in file.iter_batches(_SCANNED, columns=list(columns), use_threads=False):
                    yield from (plain(row) for row in batch.to_pylist())
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path}: cannot be read: {one_line(error)}") from error

    def runs(self) -> list[list[Part]]:
        return [run.parts for run in self._laid_out().runs]

    def _open(self) -> Any:
        """A reader of its own for whoever reads: readers are not thread-safe. It reads pages, never a whole group."""
        import pyarrow.parquet as pq

        if _stamp(self.path) != self._stamp:
            raise OSError("the file has changed since it was opened: start again")
        return pq.ParquetFile(self.path, metadata=self._metadata, pre_buffer=False, buffer_size=1 << 20)

    def _read(self, run: Run, place: int) -> Any:
        """A part of a run as a table; who wants another of the same run waits, and goes on in the same stream.

        Parts that are passed over on the way stay in the cache: an order asks for near ones soon.
        """
        key, part = (self.path, run.parts[0].start), run.parts[place]
        with run.lock:
            if (block := self.cache.peek((self.path, part.start))) is not None:
                return block
            stream: _Stream | None = self.cache.open.pop(key)
            if stream is None or stream.position > part.start:
                stream = None
                self.cache.open.make_room(part.held)
                stream = _Stream(self._open(), run, self._names)
            while stream.position < part.start:
                passed = run.at(stream.position)
                table = stream.read(passed.size)
                if part.start - passed.start <= run.near:
                    self.cache.put((self.path, passed.start), table)
            table = stream.read(part.size)
            if place + 1 < len(run.parts):
                self.cache.open.put(key, stream, part.held)
            return table

    def _laid_out(self) -> Layout:
        with self._lock:
            if self._layout is None:
                self._layout = Layout(self._metadata, set(self._names), self._inflation(), self.cache.max_bytes)
            return self._layout

    def _inflation(self) -> float:
        """How many times larger rows are in memory than the file says: repeated values are stored once there."""
        import pyarrow as pa

        groups = (i for i in range(self._metadata.num_row_groups) if self._metadata.row_group(i).num_rows)
        first = next(groups, None)
        if first is None or not self._names:
            return 1.0
        group = self._metadata.row_group(first)
        try:
            with self._open() as file:
                batch = next(file.iter_batches(64, row_groups=[first], columns=self._names, use_threads=False), None)
        except (OSError, pa.ArrowException):
            batch = None
        if batch is None or not batch.num_rows:
            return 1.0  # damaged: whoever asks for one of its rows is told
        stated = unpacked_bytes(group, set(self._names)) / group.num_rows
        return max(1.0, float(batch.nbytes / batch.num_rows / max(stated, 1.0)))


class _Stream:
    """Unpacks the rows of a run, one part after the other. ``position``: the index of the next row."""

    def __init__(self, file: Any, run: Run, names: list[str]) -> None:
        self._file = file
        self._batches = file.iter_batches(run.parts[0].size, row_groups=[run.group], columns=names, use_threads=False)
        self._batch: Any = None
        self.position = run.group_start
        while self.position < run.parts[0].start:
            self._next(run.parts[0].start - self.position)

    def read(self, count: int) -> Any:
        """The next ``count`` rows as one table."""
        import pyarrow as pa

        end, pieces = self.position + count, []
        while self.position < end:
            pieces.append(self._next(end - self.position))
        return pa.Table.from_batches(pieces)

    def _next(self, count: int) -> Any:
        """The next rows, up to ``count`` of them."""
        if self._batch is None or not self._batch.num_rows:
            self._batch = next(self._batches, None)
            if self._batch is None:
                raise OSError("a row group ends before its last row: the file is damaged")
        piece = self._batch.slice(0, count)
        self._batch = self._batch.slice(piece.num_rows)
        self.position += piece.num_rows
        return piece


def columns_of(schema: Any) -> dict[str, Column]:
    """The columns of an Arrow schema."""
    return {field.name: _column(field.type) for field in schema}


def _column(type: Any) -> Column:
    import pyarrow.types as kinds

    while isinstance(getattr(type, "storage_type", None), arrow().DataType):
        type = type.storage_type
    if kinds.is_struct(type):
        fields = {type.field(i).name: _column(type.field(i).type) for i in range(type.num_fields)}
        return Column(any(field.binary for field in fields.values()), fields)
    if kinds.is_dictionary(type) or kinds.is_nested(type):
        inner = [type.value_type] if kinds.is_dictionary(type) else [type.field(i).type for i in range(type.num_fields)]
        return Column(any(_column(t).binary for t in inner))
    return Column(
        kinds.is_binary(type)
        or kinds.is_large_binary(type)
        or kinds.is_fixed_size_binary(type)
        or kinds.is_binary_view(type)
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
