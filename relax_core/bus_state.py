"""The nouns of the data bus: holders and claims, groups with their rows, and the picklable state of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relax_core.errors import RelaxError
from relax_core.interfaces import Columns, Row

ROW_BYTES = 64
"""What a row counts for besides its columns."""


class BusError(RelaxError):
    """A call that breaks the bus's contract, such as the second write of a column. Nothing of that call was done."""


class BusClosed(Exception):
    """The bus was closed: raised by every wait, and by every later call that would change something."""


class Holder(NamedTuple):
    """Who puts and claims: a role's name, and which life of it."""

    name: str
    incarnation: int


class Holders:
    """Which incarnation of each name lives."""

    def __init__(self) -> None:
        self.incarnations: dict[str, int] = {}
        self._living: dict[str, int] = {}

    def add(self, name: str) -> Holder:
        self.incarnations[name] = self._living[name] = self.incarnations.get(name, 0) + 1
        return Holder(name, self._living[name])

    def living(self, name: str) -> Holder | None:
        return Holder(name, self._living[name]) if name in self._living else None

    def lives(self, holder: Holder | None) -> bool:
        return holder is not None and self._living.get(holder.name) == holder.incarnation

    def bury(self, holder: Holder) -> None:
        del self._living[holder.name]

    def count_on(self, incarnations: Mapping[str, int]) -> None:
        """Number new incarnations above those of an earlier process."""
        for name, number in incarnations.items():
            self.incarnations[name] = max(number, self.incarnations.get(name, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Rows that a stage works on. ``groups`` stand in claim order; ``rows`` group by group, as they were put."""

    stage: str
    holder: Holder
    rows: tuple[Row, ...]
    groups: tuple[str, ...]


def merge(claims: Sequence[Claim]) -> Claim:
    """One claim made of several of the same stage and holder, to be acked at once. Raises BusError otherwise."""
    owners = {(claim.stage, claim.holder) for claim in claims}
    if len(owners) != 1:
        raise BusError(f"merge: found claims of {len(owners)} (stage, holder) pairs; merge the claims of exactly one")
    rows = tuple(row for claim in claims for row in claim.rows)
    groups = tuple(dict.fromkeys(group for claim in claims for group in claim.groups))
    return Claim(claims[0].stage, claims[0].holder, rows, groups)


def group_of(row: str) -> str:
    """The group of a row id ``<group>/<member>/<sample>``."""
    return row.rsplit("/", 2)[0]


def size_of(columns: Columns) -> int:
    """Bytes of a row's columns: the sum of their ``nbytes``. What has none (numbers, tuples, objects) counts 0."""
    return sum(int(getattr(value, "nbytes", 0)) for value in columns.values())


@dataclass(frozen=True, slots=True)
class Write:
    """One put as a row remembers it. ``holder`` None: a holder of an earlier process, dead by now."""

    stamp: int
    names: frozenset[str]
    holder: Holder | None


@dataclass(slots=True)
class StoredRow:
    """A row on the bus; ``index`` counts the rows of its group in the order of their puts."""

    id: str
    index: int
    nbytes: int = ROW_BYTES
    columns: dict[str, Any] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)

    def add(self, columns: Columns, write: Write) -> int:
        """Write new columns; returns their bytes."""
        self.columns.update(columns)
        self.writes.append(write)
        nbytes = size_of(columns)
        self.nbytes += nbytes
        return nbytes

    def writer(self, name: str) -> Holder | None:
        return next(write.holder for write in self.writes if name in write.names)

    def completed(self, needs: frozenset[str]) -> int:
        """When the last of ``needs`` came; the first write made the row itself."""
        stamps = (w.stamp for w in self.writes if not needs.isdisjoint(w.names))
        return max(stamps, default=self.writes[0].stamp)

    def view(self, group: str, names: Sequence[str] | None = None) -> Row:
        """The row as a stage sees it; with all columns when no names are given."""
        columns = dict(self.columns) if names is None else {name: self.columns[name] for name in names}
        return Row(self.id, group, columns)


@dataclass(slots=True)
class StoredGroup:
    """A group on the bus. ``closed`` is the stamp of its closing; None: its plays still go on.

    ``acked``: by stage, the units (row ids, or the group's id) with which the stage is done.
    """

    id: str
    serial: int
    task: Any
    holder: Holder | None
    closed: int | None = None
    rows: dict[str, StoredRow] = field(default_factory=dict)
    acked: dict[str, set[str]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows.values())

    def completed(self, needs: frozenset[str]) -> int:
        """When a closed group got the last of ``needs`` for the last of its rows."""
        return max([self.closed or 0, *(row.completed(needs) for row in self.rows.values())])

    def views(self, names: Sequence[str] | None = None) -> list[Row]:
        return [row.view(self.id, names) for row in self.rows.values()]

    def copy(self, keep_holders: bool) -> StoredGroup:
        """A copy that shares the columns' values. Without holders every write is one of the dead."""
        rows = {row.id: _copy(row, keep_holders) for row in self.rows.values()}
        acked = {stage: set(units) for stage, units in self.acked.items()}
        holder = self.holder if keep_holders else None
        return StoredGroup(self.id, self.serial, self.task, holder, self.closed, rows, acked)


def _copy(row: StoredRow, keep_holders: bool) -> StoredRow:
    writes = list(row.writes) if keep_holders else [Write(w.stamp, w.names, None) for w in row.writes]
    return StoredRow(row.id, row.index, row.nbytes, dict(row.columns), writes)


@dataclass(frozen=True, slots=True)
class BusState:
    """What a snapshot holds: closed groups that are not trained. Claims and open groups are not in it.

    ``incarnations`` go on counting after a restore, so that no new holder equals one of before.
    """

    groups: tuple[StoredGroup, ...]
    clock: int
    incarnations: Mapping[str, int]
