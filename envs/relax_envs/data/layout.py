"""How a Parquet file is cut into blocks of bounded size, from its metadata."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from relax_envs.data.source import Part

PAGE_ROWS = 1024
"""Writers close a page, the least that can be unpacked, after so many rows or earlier."""

SEGMENTS = 4
"""Runs that a row group of many parts makes: an order may begin at each; rows before it are passed over."""


@dataclass(slots=True)
class Run:
    """Parts of one row group that are unpacked one after the other; all have the size of the first but the last one.

    ``group_start``: index of the group's first row. ``near``: how many rows before a part others are that the same
    window of an order may hold.
    """

    group: int
    group_start: int
    parts: list[Part]
    near: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever reads."""

    def at(self, index: int) -> Part:
        """The part that holds a row."""
        return self.parts[(index - self.parts[0].start) // self.parts[0].size]


class Layout:
    """``names``: the columns that are read. ``inflation``: rows are so many times larger in memory than stated."""

    def __init__(self, metadata: Any, names: set[str], inflation: float, cache_bytes: int) -> None:
        self.runs: list[Run] = []
        start = 0
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            nbytes = int(unpacked_bytes(group, names) * inflation)
            parts = list(_cut(start, group.num_rows, nbytes, cache_bytes))
            near = group.num_rows * (cache_bytes // 2) // max(nbytes, 1)
            self.runs += [Run(i, start, segment, near) for segment in _segments(parts)]
            start += group.num_rows
        self._starts = [run.parts[0].start for run in self.runs]

    def find(self, index: int) -> tuple[Run, int]:
        """The run that holds a row, and the place of its part in it."""
        run = self.runs[bisect_right(self._starts, index) - 1]
        return run, (index - run.parts[0].start) // run.parts[0].size


def _cut(start: int, count: int, nbytes: int, cache_bytes: int) -> Iterator[Part]:
    """A row group up to a quarter of the cache is one part, a larger one is cut into parts of a sixteenth."""
    step, held = count, 0
    if nbytes > cache_bytes // 4:
        held = nbytes * min(count, PAGE_ROWS) // count
        rows = max(1, count * (cache_bytes // 16) // nbytes)
        step = 1 << (rows.bit_length() - 1)  # a power of two: the same for sizes that are nearly the same
    for first in range(0, count, step or 1):
        size = min(step, count - first)
        yield Part(start + first, size, nbytes * size // count, held)


def _segments(parts: list[Part]) -> list[list[Part]]:
    if len(parts) < 2 * SEGMENTS:
        return [parts] if parts else []
    cuts = [len(parts) * i // SEGMENTS for i in range(SEGMENTS + 1)]
    return [parts[a:b] for a, b in pairwise(cuts)]


def unpacked_bytes(group: Any, names: set[str]) -> int:
    """Bytes of the named columns of a row group, as its metadata state them."""
    chunks = (group.column(j) for j in range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema in names or chunk.path_in_schema.partition(".")[0] in names
    )
