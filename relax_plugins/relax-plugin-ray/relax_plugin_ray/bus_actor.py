"""The actor that holds the bus: it moves references, never values, and lets any number of clients wait."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from relax_core.bus import Bus, BusClosed, BusError, Holder
from relax_core.errors import FencedError
from relax_core.interfaces import Row
from relax_plugin_ray.boxes import PIECE_BYTES, Box, find_box
from relax_plugin_ray.bus_table import Table, from_table, to_table
from relax_plugin_ray.logs import to_role_log

BUNDLE_BYTES = 4_000_000
"""Of what calls carried, put in the object store as one."""
REMEMBERED = 65_536
"""Calls that were answered, and can still be taken back."""
TURNS = 8
"""Of the event loop, in which whatever need not wait comes to its end."""


class Call(NamedTuple):
    """A call of a client. ``boxed``: the new boxes in it, each with the number of arguments that are its flat content.

    With 0, one argument is the box's segments, which the actor maps from then on.
    """

    ticket: str
    name: str
    values: tuple[Any, ...]
    boxed: list[tuple[Box, int]]


class Failed(NamedTuple):
    """The answer to a call that raised."""

    error: Exception


class Pending(NamedTuple):
    """The answer to a call that has to wait: ask for its ``result``."""


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
        """Of the latest write."""
        return self._store.clock

    def take_back_rows(self, group: str, ids: Sequence[str], stamp: int) -> None:
        """Remove new rows that were written at ``stamp``, if their group is still open: nobody has claimed them."""
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
    """To be made with ``ray.remote``. The calls of one client start in the order in which it made them."""

    def __init__(self, max_rows: int, max_bytes: int, directory: Path | None = None) -> None:
        """``directory``: of the run, for a log."""
        if directory is not None:
            to_role_log("bus", directory)
        self._bus = ActorBus(max_rows, max_bytes)
        self._waiting: dict[str, asyncio.Task[Any]] = {}  # on the bus, by ticket
        self._pending: dict[str, asyncio.Task[Any]] = {}  # whose results will be asked for
        self._undo: OrderedDict[str, tuple[Any, ...]] = OrderedDict()
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # before they began, or could be noted as done

    def __repr__(self) -> str:
        return "bus"

    async def one(self, call: Call, *contents: Any) -> Any:
        """The answer to a call, however long it has to wait."""
        _take_in(call.boxed, iter(contents))
        return await self._answer(call)

    async def many(self, calls: list[Call], *contents: Any) -> list[Any]:
        """The answers to calls that were made at the same time; none of them holds up the others."""
        rest = iter(contents)
        for call in calls:
            _take_in(call.boxed, rest)
        tasks = [asyncio.ensure_future(self._answer(call)) for call in calls]
        for _ in range(TURNS):
            await asyncio.sleep(0)
        answers = [task.result() if task.done() else Pending() for task in tasks]
        for call, task in zip(calls, tasks, strict=True):
            if not task.done():
                self._pending[call.ticket] = task
        return answers

    async def result(self, ticket: str) -> Any:
        """The answer to a call that was pending."""
        return await self._pending.pop(ticket)

    async def cancel(self, ticket: str) -> None:
        """End the wait of a call; if it has ended already, undo what it got."""
        self._pending.pop(ticket, None)
        task = self._waiting.get(ticket)
        if task is not None and task.cancel():
            return
        undo = self._undo.pop(ticket, None)
        if undo is not None:
            undo[0](*undo[1:])
        else:
            _remember(self._cancelled, ticket, None)

    async def adopt(self, box: str) -> tuple[list[Any], int | None] | None:
        """Where the content of a box whose maker died lies now; None if no row on the bus refers to it."""
        found = find_box(box)
        return None if found is None else found.adopt()

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _answer(self, call: Call) -> Any:
        try:
            if call.name == "claim":
                return await self._claim(call.ticket, *call.values)
            if call.name == "put":
                return await self._put(call.ticket, *call.values)
            if call.name == "finish":
                claim, table = call.values
                return await self._bus.finish(claim, _columns(table))
            found = getattr(self._bus, call.name)
            if callable(found):
                found = found(*call.values)
            if asyncio.iscoroutine(found):
                found = await found
        except (BusError, BusClosed, FencedError) as error:
            return Failed(error)
        return await _table(found) if isinstance(found, list) and call.name != "orphans" else found

    async def _claim(self, ticket: str, stage: str, needs: frozenset[str], count: int, by: Any, *how: Any) -> Any:
        claim = await self._wait(ticket, self._bus.claim(stage, needs, count, by, *how))
        if claim is None:
            return None
        units = claim.groups if by == "group" else tuple(row.id for row in claim.rows)
        self._done(ticket, self._bus.take_back_claim, stage, claim.holder, units)
        return Granted(claim.groups, await _table(claim.rows))

    async def _put(self, ticket: str, table: Table, holder: Holder, group: str | None) -> int | None:
        columns = _columns(table)
        if group is None:
            return await self._bus.put(columns, holder)
        found = await self._wait(ticket, self._put_new(columns, holder, group))
        if found is None:
            return None
        written, stamp = found
        self._done(ticket, self._bus.take_back_rows, group, tuple(columns), stamp)
        return int(written)

    async def _put_new(self, columns: dict[str, Any], holder: Holder, group: str) -> tuple[int, int]:
        return await self._bus.put(columns, holder, group), self._bus.stamp()

    async def _wait(self, ticket: str, call: Any) -> Any:
        """What the call gives; None if it was cancelled."""
        if self._cancelled.pop(ticket, 0) is None:
            call.close()
            return None
        task = self._waiting[ticket] = asyncio.ensure_future(call)
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            del self._waiting[ticket]

    def _done(self, ticket: str, *undo: Any) -> None:
        if self._cancelled.pop(ticket, 0) is None:
            undo[0](*undo[1:])
        else:
            _remember(self._undo, ticket, undo)


def _columns(table: Table) -> dict[str, dict[str, Any]]:
    return {id: raw for id, _, raw in from_table(table)}


def _take_in(boxed: Sequence[tuple[Box, int]], contents: Iterator[Any]) -> None:
    for box, pieces in boxed:
        if pieces:
            box.data = b"".join(islice(contents, pieces))
        else:
            box.keep(next(contents))


async def _table(rows: Sequence[Row]) -> Table:
    """Rows as they travel. What their boxes carry goes to the object store first, together, if it is much."""
    table = to_table([(row.id, row.group, dict(row.columns)) for row in rows])
    carried = [box for box in table.boxes if box.data is not None]
    if sum(len(box.data or b"") for box in carried) <= PIECE_BYTES:
        return table
    while carried:
        some, size = [], 0
        while carried and size < BUNDLE_BYTES:
            some.append(carried.pop())
            size += len(some[-1].data or b"")
        ref = ray.put([np.frombuffer(box.data or b"", np.uint8) for box in some])
        for part, box in enumerate(some):
            box.move(ref, part)
        if carried:
            await asyncio.sleep(0)  # nobody waits longer than one bundle takes
            carried = [box for box in carried if box.data is not None]
    return table


def _remember(what: OrderedDict[str, Any], ticket: str, value: Any) -> None:
    what[ticket] = value
    if len(what) > REMEMBERED:
        what.popitem(last=False)
