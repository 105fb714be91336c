"""The actor that holds the bus: it moves references, never values, and lets any number of clients wait."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from relax_core.bus import Bus, BusClosed, BusError, Claim, Holder
from relax_core.bus_lane import By, Order
from relax_core.errors import FencedError
from relax_core.interfaces import Row
from relax_plugin_ray.bus_table import RawRow, Table, from_table, to_table
from relax_plugin_ray.references import Box, find_box

REMEMBERED = 65_536
"""Calls that were answered, and can still be taken back."""


class Failed(NamedTuple):
    """The answer to a call that raised."""

    error: Exception


class Granted(NamedTuple):
    """The answer to a claim: its groups, and its rows in a table."""

    groups: tuple[str, ...]
    rows: Table


class Opaque:
    """A pickled value that this process has no business to look into."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return (Opaque, (self.data,))


class ActorBus(Bus):
    """A bus that can undo what was granted to a call that its caller had cancelled before it could know."""

    def take_back_claim(self, stage: str, holder: Holder, units: Sequence[str]) -> None:
        """Offer these units again, if the holder still holds them."""
        lane = self._lanes.get(stage)
        for unit in units:
            if lane is not None and unit in lane.held and lane.held[unit][1] == holder:
                lane.ready.add(lane.free(unit))
        self._moved()

    def stamp(self) -> int:
        return self._store.clock

    def take_back_rows(self, group: str, ids: Sequence[str], stamp: int) -> None:
        """Remove new rows that were written at ``stamp``, if their group is still open: nobody has seen them."""
        target = self._store.groups.get(group)
        if target is None or target.closed is not None:
            return
        rows = [row for row in map(target.rows.get, ids) if row is not None and row.writes[0].stamp == stamp]
        for row in rows:
            del target.rows[row.id]
        for index, row in enumerate(target.rows.values()):
            row.index = index
        for lane in self._lanes.values():
            lane.complete[group] -= sum(lane.needs <= row.columns.keys() for row in rows)
        self._bound.add(-len(rows), -sum(row.nbytes for row in rows))
        self._moved()


class BusActor:
    """To be made with ``ray.remote``. A call that may wait has a ticket, with which its client can cancel it.

    Calls of one client start in the order in which it made them.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._bus = ActorBus(max_rows, max_bytes)
        self._waiting: dict[str, asyncio.Task[Any]] = {}
        self._done: OrderedDict[str, tuple[Any, ...] | None] = OrderedDict()  # how to take back, by ticket
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # before they began, or before they could be noted

    # --- what may wait ------------------------------------------------------------------------------------------------

    async def claim(
        self,
        ticket: str,
        stage: str,
        needs: frozenset[str],
        count: int,
        by: By,
        holder: Holder,
        order: Order,
        exact: bool,
    ) -> Granted | Failed | None:
        claim = await self._wait(ticket, self._bus.claim(stage, needs, count, by, holder, order, exact))
        if not isinstance(claim, Claim):
            return claim
        units = claim.groups if by == "group" else tuple(row.id for row in claim.rows)
        self._settle(ticket, self._bus.take_back_claim, stage, holder, units)
        return Granted(claim.groups, to_table(_raw(claim.rows)))

    async def put(
        self, ticket: str, table: Table, holder: Holder, group: str | None, boxed: list[Box], *contents: Any
    ) -> int | Failed | None:
        """``contents``: of ``boxed``, mapped from now on."""
        for box, content in zip(boxed, contents, strict=True):
            box.keep(content)
        columns = {id: raw for id, _, raw in from_table(table)}
        written = await self._wait(ticket, self._bus.put(columns, holder, group))
        if group is not None and isinstance(written, int):
            self._settle(ticket, self._bus.take_back_rows, group, tuple(columns), self._bus.stamp())
        return written

    async def cancel(self, ticket: str) -> None:
        """End the wait of a call; if it has ended already, undo what it got."""
        task = self._waiting.get(ticket)
        if task is not None and task.cancel():
            return
        undo = self._done.pop(ticket, None)
        if undo is not None:
            undo[0](*undo[1:])
        else:
            _remember(self._cancelled, ticket, None)

    async def _wait(self, ticket: str, call: Coroutine[Any, Any, Any]) -> Any:
        """What the call gives; Failed for its errors; None if it was cancelled."""
        if ticket in self._cancelled:
            call.close()
            return None
        task = self._waiting[ticket] = asyncio.ensure_future(call)
        try:
            return await task
        except asyncio.CancelledError:
            return None
        except (BusError, BusClosed, FencedError) as error:
            return Failed(error)
        finally:
            del self._waiting[ticket]

    def _settle(self, ticket: str, *undo: Any) -> None:
        if ticket in self._cancelled:
            undo[0](*undo[1:])
        else:
            _remember(self._done, ticket, undo)

    # --- what does not ------------------------------------------------------------------------------------------------

    async def call(self, name: str, *values: Any) -> Any:
        """A method of the bus that never waits, or one of its gauges."""
        try:
            found = getattr(self._bus, name)
            if callable(found):
                found = found(*values)
            if asyncio.iscoroutine(found):
                found = await found
        except (BusError, BusClosed, FencedError) as error:
            return Failed(error)
        return to_table(_raw(found)) if isinstance(found, list) and name != "orphans" else found

    async def ack(
        self, stage: str, holder: Holder, rows: list[tuple[str, str]], groups: tuple[str, ...], retain: int | None
    ) -> Any:
        claim = Claim(stage, holder, tuple(Row(id, group, {}) for id, group in rows), groups)
        return await self.call("ack", claim, retain)

    async def adopt(self, box: str) -> list[Any] | None:
        """A new reference to the content of a box whose maker died; None if no row on the bus refers to it."""
        found = find_box(box)
        return None if found is None else found.adopted()

    async def restore(self, state: Any, boxed: list[Box], *contents: Any) -> Any:
        for box, content in zip(boxed, contents, strict=True):
            box.keep(content)
        return await self.call("restore", state)


def _raw(rows: Sequence[Row]) -> list[RawRow]:
    return [(row.id, row.group, dict(row.columns)) for row in rows]


def _remember(what: OrderedDict[str, Any], ticket: str, value: Any) -> None:
    what[ticket] = value
    if len(what) > REMEMBERED:
        what.popitem(last=False)
