"""The groups and rows on the bus, and what may be written to them; nothing here waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from relax_core.bus_lane import By, Key, Line
from relax_core.bus_state import BusError, BusState, Holder, StoredGroup, StoredRow, Write, group_of
from relax_core.interfaces import Columns, Row

REMEMBERED = 65_536
"""Groups that have left and are still known by name."""


class More(NamedTuple):
    """New columns of a row that is there; those that a dead holder had written before are left out."""

    group: StoredGroup
    row: StoredRow
    columns: Columns
    names: frozenset[str]


class Store:
    """``lives`` tells whether the writer of a column is a living holder: only then is a second write an error."""

    def __init__(self, lives: Callable[[Holder | None], bool]) -> None:
        self.groups: dict[str, StoredGroup] = {}
        self.open = Line()
        self.retained: dict[int, list[tuple[str, StoredRow]]] = {}
        self.clock = 0
        self._lives = lives
        self._gone: OrderedDict[str, bool] = OrderedDict()  # whether it was open when it left

    # --- groups -------------------------------------------------------------------------------------------------------

    def find(self, group: str) -> StoredGroup | None:
        """The living group; None if it has left; BusError if nobody ever opened it."""
        found = self.groups.get(group)
        if found is None and group not in self._gone:
            raise BusError(f"bus: no group {group!r}; open it first (row ids are <group>/<member>/<sample>)")
        return found

    def enter(self, group: StoredGroup) -> None:
        if group.id in self.groups or self._gone.get(group.id) is False:
            raise BusError(f"bus: group {group.id!r} was opened before; every attempt needs an id of its own")
        self._gone.pop(group.id, None)
        self.groups[group.id] = group
        if group.closed is None:
            self.open.add(Key(0, group.serial, 0, group.id))

    def leave(self, group: StoredGroup) -> None:
        del self.groups[group.id]
        self.open.discard(group.id)
        self._gone[group.id] = group.closed is None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def close(self, group: StoredGroup, n_rows: int) -> None:
        if group.closed is not None or len(group.rows) != n_rows:
            found = "is closed already" if group.closed is not None else f"has {len(group.rows)} rows"
            raise BusError(
                f"bus: closing group {group.id!r} with {n_rows} rows, but it {found}; close after the last put"
            )
        group.closed = self._tick()
        self.open.discard(group.id)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def check_new(self, group: StoredGroup, columns: Mapping[str, Columns]) -> None:
        """Raises BusError for new rows that cannot be added."""
        if group.closed is not None:
            raise BusError(f"bus: new rows for group {group.id!r}, which is closed; put all rows before close_group")
        for row in columns:
            if row in group.rows or group_of(row) != group.id:
                raise BusError(
                    f"bus: new row {row!r} of group {group.id!r}: ids must be new, <group>/<member>/<sample>"
                )

    def add_rows(self, group: StoredGroup, columns: Mapping[str, Columns], holder: Holder) -> list[StoredRow]:
        stamp = self._tick()
        added = [StoredRow(row, len(group.rows) + i) for i, row in enumerate(columns)]
        for row in added:
            row.add(columns[row.id], Write(stamp, frozenset(columns[row.id]), holder))
            group.rows[row.id] = row
        return added

    def plan(self, columns: Mapping[str, Columns]) -> list[More]:
        """What is to be written: rows of groups that have left are not. Raises BusError; writes nothing."""
        found: list[More] = []
        for row_id, given in columns.items():
            group = self.find(group_of(row_id))
            if group is None:
                continue
            row = group.rows.get(row_id)
            if row is None:
                raise BusError(f"bus: more columns for {row_id!r}, which is no row of group {group.id!r}; put it first")
            new = {name: given[name] for name in given if self._is_new(row, name)}
            found.append(More(group, row, new, frozenset(new)))
        return found

    def write(self, plan: list[More], holder: Holder) -> int:
        """Do what was planned. Returns the bytes added."""
        stamp = self._tick()
        return sum(more.row.add(more.columns, Write(stamp, more.names, holder)) for more in plan if more.names)

    def views(self, units: Sequence[str], by: By, names: Sequence[str]) -> tuple[list[str], list[Row]]:
        """The groups of some units, each once, and the units' rows."""
        if by == "group":
            return list(units), [row for unit in units for row in self.groups[unit].views(names)]
        owners = [group_of(unit) for unit in units]
        rows = [self.groups[owner].rows[unit].view(owner, names) for owner, unit in zip(owners, units, strict=True)]
        return list(dict.fromkeys(owners)), rows

    def _is_new(self, row: StoredRow, name: str) -> bool:
        if name not in row.columns:
            return True
        writer = row.writer(name)
        if self._lives(writer):
            who = "" if writer is None else f" by {writer.name!r}"
            raise BusError(f"bus: column {name!r} of row {row.id!r} was written before{who}; columns are write-once")
        return False

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    # --- trained rows and snapshots -----------------------------------------------------------------------------------

    def retain(self, group: StoredGroup, step: int) -> None:
        self.leave(group)
        self.retained.setdefault(step, []).extend((group.id, row) for row in group.rows.values())

    def release(self, step: int) -> tuple[list[Row], int]:
        """Free the rows of every step up to ``step``; returns them and their bytes."""
        freed = [pair for s in sorted(self.retained) if s <= step for pair in self.retained.pop(s)]
        return [Row(row.id, group, row.columns) for group, row in freed], sum(row.nbytes for _, row in freed)

    def snapshot(self, incarnations: Mapping[str, int]) -> BusState:
        groups = sorted((g for g in self.groups.values() if g.closed is not None), key=lambda g: g.serial)
        return BusState(tuple(g.copy(keep_holders=True) for g in groups), self.clock, dict(incarnations))
