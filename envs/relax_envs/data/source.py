"""What every file of rows offers, several files behind each other, and rows picked from one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.errors import DataError


class Part(NamedTuple):
    """Rows that are read at once: the first one's index, and how many there are.

    ``nbytes``: what they take in memory, about. ``held``: what is in memory besides while their run is being read.
    """

    start: int
    size: int
    nbytes: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a file with a schema. ``binary``: bytes are in it; ``fields``: those of an object, where known."""

    binary: bool = False
    fields: Mapping[str, Column] | None = None


class Rows(ABC):
    """The rows of a data set, by index from 0. Thread-safe once opened."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column] | None:
        """By name; None where each row says for itself which it has."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> dict[str, Any]:
        """A row as plain Python. Raises ValueError, OSError or DataError for one that cannot be read."""

    @abstractmethod
    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        """Every row in one pass, with these columns at least; None for one that cannot be read."""

    @abstractmethod
    def place(self, index: int) -> tuple[Path, int]:
        """The file of a row, and the number of its line (of the row, where there are no lines) from 1."""

    def select(self, columns: Collection[str]) -> None:
        """From now on ``row`` needs to give these columns only."""

    def runs(self) -> list[list[Part]]:
        """Parts that are cheap to read one after the other; none where any order of rows is as good as another."""
        return []

    def where(self, index: int) -> str:
        path, number = self.place(index)
        return f"{path}:{number}"


class Joined(Rows):
    """Files with the same kind of rows behind each other. Empty ones may be among them."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = list(parts)
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + len(part))

    @property
    def columns(self) -> Mapping[str, Column] | None:
        """Those that all files have."""
        first, *others = [part.columns for part in self.parts]
        if first is None:
            return None
        return {name: column for name, column in first.items() if all(name in (other or ()) for other in others)}

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[Rows, int]:
        place = bisect_right(self._starts, index) - 1
        return self.parts[place], index - self._starts[place]

    def row(self, index: int) -> dict[str, Any]:
        part, inner = self._find(index)
        return part.row(inner)

    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        for part in self.parts:
            yield from part.scan(columns)

    def place(self, index: int) -> tuple[Path, int]:
        part, inner = self._find(index)
        return part.place(inner)

    def select(self, columns: Collection[str]) -> None:
        for part in self.parts:
            part.select(columns)

    def runs(self) -> list[list[Part]]:
        found = []
        for start, part in zip(self._starts, self.parts, strict=False):
            found += [[p._replace(start=start + p.start) for p in run] for run in part.runs()]
        return found


class Picked(Rows):
    """Rows of another data set, in an order of their own: what a saved selection of it holds."""

    def __init__(self, rows: Rows, indices: Iterable[int]) -> None:
        self.rows, self.indices = rows, array("Q", indices)
        if self.indices and max(self.indices) >= len(rows):
            raise DataError(f"{rows.place(0)[0]}: its indices point beyond its {len(rows)} rows: save it again")

    @property
    def columns(self) -> Mapping[str, Column] | None:
        return self.rows.columns

    def __len__(self) -> int:
        return len(self.indices)

    def row(self, index: int) -> dict[str, Any]:
        return self.rows.row(self.indices[index])

    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        for index in self.indices:
            yield self.rows.row(index)

    def place(self, index: int) -> tuple[Path, int]:
        return self.rows.place(self.indices[index])

    def select(self, columns: Collection[str]) -> None:
        self.rows.select(columns)
