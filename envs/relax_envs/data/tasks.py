"""The tasks of one data set: a sequence that reads a row when it is asked for it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from relax_core.content_hash import content_hash
from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig
from relax_core.tasks import TaskSequence
from relax_core.types import Task
from relax_envs.data.blocks import shuffled
from relax_envs.data.columns import Columns, read_columns
from relax_envs.data.ids import Duplicates
from relax_envs.data.opening import Scan, default_ids, open_rows
from relax_envs.data.rows import TaskMaker
from relax_envs.split import held_out

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Source(ComponentConfig):
    path: Path
    """A file (.jsonl, .json, .parquet, .arrow), a pattern, or a folder: with such files, of a hub, or saved by
    ``datasets``."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share in training, beside the other sources."""
    hf_split: str | None = None
    """Which split of a folder, such as ``train``; ``all`` for every file."""
    columns: Columns | Path | None = None
    """Which column is what: a mapping, or the path of a YAML file with one; default: those of the environment."""
    media_root: Path | None = None
    """Relative paths of media begin here; default: in the folder of the row's file."""
    urls: bool | tuple[str, ...] = False
    """Whether media behind http addresses are fetched, whenever their row is read: from any host, or from those
    listed."""
    cache_bytes: PositiveInt = 256_000_000
    """Parquet: memory for rows that were read ahead. Rows are shuffled within half of it, all of them if they fit."""


class DataSet:
    """The rows of a source as tasks. ``prefix`` begins the id of each.

    Raises DataError when it cannot be opened, ConfigError when its settings are wrong.
    """

    def __init__(self, source: Source, columns: Columns | Path | None, need_answer: bool, prefix: str = "") -> None:
        self.source, self.prefix = source, prefix
        chosen = read_columns(columns if source.columns is None else source.columns)
        self.maker = TaskMaker(chosen, source.media_root, source.urls, need_answer)
        self.rows = open_rows(source.path, source.hf_split, source.cache_bytes)
        self._default = default_ids(self.rows)
        self.scan = Scan(self.rows, self.maker.mapper, str(source.path), self._named)
        self.others: Sequence[DataSet] = (self,)
        """All data sets of the environment, this one among them."""
        self.duplicates: Duplicates | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def _named(self, index: int, own: str | None) -> str:
        return self.prefix + (own if own is not None else self._default(index))

    def id(self, index: int) -> str:
        """The id of a row's task. Raises ValueError or OSError where the row has none that can be read."""
        return self._named(index, self.maker.mapper.id(self.rows.row(index)))

    def task(self, index: int) -> Task:
        """The task of a row. Raises DataError with its file and line, and the reason."""
        try:
            row = self.rows.row(index)
            id = self._named(index, self.maker.mapper.id(row))
            self._check_id(index, id)
            return self.maker.task(row, self.rows.place(index)[0].parent, id)
        except (ValueError, OSError, RecursionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{self.rows.where(index)}: {reason}") from error

    def _check_id(self, index: int, id: str) -> None:
        if self.duplicates is None or (found := self.duplicates.first(self.others.index(self), index)) is None:
            return
        other, first = self.others[found[0]], found[1]
        if other.id(first) == id:
            raise ValueError(f"id {id!r} was already used at {other.rows.where(first)}: make it unique")

    def known_bad(self) -> set[int]:
        """Rows of which it is known without making them that they are bad."""
        repeated = self.duplicates.of(self.others.index(self)) if self.duplicates is not None else []
        return {*self.scan.unreadable, *repeated}

    def split(self, fraction: float) -> tuple[DataTasks, DataTasks]:
        """All rows for training but a ``fraction`` by the hash of what they say and show; bad ones stay in training."""
        train, held, bad = array("q"), array("q"), set[int]()
        for index in range(len(self)):
            try:
                is_held = held_out(content_hash(self.task(index)), fraction)
            except DataError:
                is_held = False
                bad.add(index)
            except OSError:  # a medium that is there and cannot be read: whoever decodes it is told
                is_held = False
            (held if is_held else train).append(index)
        return DataTasks(self, train, bad), DataTasks(self, held, set())


class DataTasks(TaskSequence):
    """The tasks of some rows of a data set (default: of all)."""

    def __init__(self, data: DataSet, indices: array[int] | None = None, bad: Collection[int] | None = None) -> None:
        self.data, self._indices = data, indices
        self._bad = data.known_bad() if bad is None else bad

    @property
    def bad_places(self) -> list[int]:
        """Places of which it is known that asking for them raises DataError."""
        if self._indices is None:
            return sorted(self._bad)
        return [place for place, index in enumerate(self._indices) if index in self._bad] if self._bad else []

    def __len__(self) -> int:
        return len(self.data) if self._indices is None else len(self._indices)

    def make(self, place: int) -> Task:
        """Raises DataError with file, line and reason for a row that cannot be used."""
        return self.data.task(place if self._indices is None else self._indices[place])

    def where(self, index: int) -> str:
        """File and line of a row."""
        return self.data.rows.where(index if self._indices is None else self._indices[index])

    def order(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """A permutation for one pass, with rows near each other that are read together (``blocks.shuffled``)."""
        import numpy as np

        rows = shuffled(len(self.data), self.data.rows.runs(), rng, self.data.source.cache_bytes)
        if self._indices is None:
            return rows
        places = np.full(len(self.data), -1, np.int64)
        places[np.frombuffer(self._indices, np.int64)] = np.arange(len(self._indices))
        found = places[rows]
        return found[found >= 0]
