"""What each stage may claim, kept in order as columns arrive, and who waits for it.

A unit is what a stage claims: a row or a whole group. No claim ever looks at more units than it takes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from relax_core.bus_state import BusError, Claim, Holder, StoredGroup, StoredRow, group_of

By = Literal["row", "group"]
Order = Literal["any", "started", "finished"]


class Key(NamedTuple):
    """Where a unit stands in its lane; ``time`` is 0 but for order ``finished``."""

    time: int
    serial: int
    place: int
    unit: str


class Line:
    """Units sorted by key: to add or remove one costs a bisection."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._of: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def first(self) -> Key:
        return self._keys[0]

    def units(self) -> list[str]:
        return [key.unit for key in self._keys]

    def add(self, key: Key) -> None:
        if key.unit not in self._of:
            self._of[key.unit] = key
            insort(self._keys, key)

    def discard(self, unit: str) -> None:
        key = self._of.pop(unit, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def before(self, key: Key) -> int:
        """How many units stand before ``key``."""
        return bisect_left(self._keys, key)

    def take(self, count: int) -> list[Key]:
        keys = self._keys[:count]
        del self._keys[:count]
        for key in keys:
            del self._of[key.unit]
        return keys


@dataclass(eq=False, slots=True, kw_only=True)
class Waiter:
    """A coroutine that waits for its turn. Who is woken looks again: nothing is handed over with the call."""

    holder: Holder
    future: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether it sleeps and nobody has woken it yet."""
        return self.future is not None and not self.future.done()

    def wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def wait(self) -> None:
        self.future = asyncio.get_running_loop().create_future()
        await self.future


@dataclass(eq=False, slots=True, kw_only=True)
class ClaimWaiter(Waiter):
    count: int
    exact: bool


@dataclass(slots=True)
class Lane:
    """The units of one stage: ``ready`` may be handed out, ``held`` were. First come, first served among waiters.

    ``unready`` is kept for order ``started`` alone: its first unit blocks all that started later.
    ``complete`` counts a group's rows that have all needed columns.
    """

    stage: str
    needs: frozenset[str]
    by: By
    order: Order
    ready: Line = field(default_factory=Line)
    unready: Line = field(default_factory=Line)
    held: dict[str, tuple[Key, Holder]] = field(default_factory=dict)
    complete: dict[str, int] = field(default_factory=dict)
    waiters: deque[ClaimWaiter] = field(default_factory=deque)

    @property
    def way(self) -> tuple[frozenset[str], By, Order]:
        """How its stage claims."""
        return (self.needs, self.by, self.order)

    # --- what happens to groups

    def enter(self, group: StoredGroup) -> None:
        """Take up a living group, in whatever state it is."""
        self.complete[group.id] = sum(self.needs <= row.columns.keys() for row in group.rows.values())
        if group.closed is not None:
            self.close(group)
        elif self.order == "started":
            self.unready.add(Key(0, group.serial, -1, group.id))

    def wrote(self, group: StoredGroup, rows: Iterable[StoredRow]) -> None:
        """These rows are new, or got columns of which at least one is needed."""
        done = [row for row in rows if self.needs <= row.columns.keys()]
        self.complete[group.id] += len(done)
        if group.closed is None:
            return
        if self.by == "group":
            self._place(group, None)
        else:
            for row in done:
                self._place(group, row)

    def close(self, group: StoredGroup) -> None:
        self.unready.discard(group.id)
        if self.by == "group":
            self._place(group, None)
        else:
            for row in group.rows.values():
                self._place(group, row)

    def leave(self, group: StoredGroup) -> None:
        """Forget a group that is evicted or trained."""
        for unit in (group.id,) if self.by == "group" else (group.id, *group.rows):
            self.ready.discard(unit)
            self.unready.discard(unit)
            if unit in self.held:
                self.free(unit)
        del self.complete[group.id]

    def _place(self, group: StoredGroup, row: StoredRow | None) -> None:
        """Let a unit of a closed group stand where it belongs."""
        unit = group.id if row is None else row.id
        if unit in group.acked.get(self.stage, ()):
            return
        if row is None:
            complete = self.complete[group.id] == len(group.rows)
        else:
            complete = self.needs <= row.columns.keys()
        if complete:
            self.unready.discard(unit)
            self.ready.add(self._key(group, row))
        elif self.order == "started":
            self.unready.add(self._key(group, row))

    def _key(self, group: StoredGroup, row: StoredRow | None) -> Key:
        unit, place = (group.id, -1) if row is None else (row.id, row.index)
        if self.order != "finished":
            return Key(0, group.serial, place, unit)
        done = group.completed(self.needs) if row is None else max(group.closed or 0, row.completed(self.needs))
        return Key(done, group.serial, place, unit)

    # --- handing out

    def available(self, count: int, exact: bool) -> int:
        """How many units a claim for ``count`` gets now; 0: it waits."""
        found = self.ready.before(self.unready.first) if self.unready else len(self.ready)
        return min(found, count) if found >= count or not exact else 0

    def take(self, count: int, holder: Holder) -> list[str]:
        keys = self.ready.take(count)
        for key in keys:
            self.held[key.unit] = (key, holder)
        return [key.unit for key in keys]

    def free(self, unit: str) -> Key:
        """End the holding of a unit."""
        return self.held.pop(unit)[0]

    def offer_again(self, holder: Holder) -> None:
        """Take back everything that a dead holder has, each unit to its old place."""
        for unit in [unit for unit, (_, owner) in self.held.items() if owner == holder]:
            self.ready.add(self.free(unit))

    def call(self) -> None:
        """Wake the first waiter if there is something for it."""
        if self.waiters:
            first = self.waiters[0]
            if first.idle and self.available(first.count, first.exact):
                first.wake()


class Lanes(dict[str, Lane]):
    """The lanes of a bus by stage, each made at the stage's first claim; ``claimants``: the living who ever claimed."""

    def __init__(self) -> None:
        super().__init__()
        self.claimants: set[Holder] = set()

    def of(self, stage: str, way: tuple[frozenset[str], By, Order], groups: Iterable[StoredGroup]) -> Lane:
        """The lane of a stage. Raises BusError if it claimed in another way before."""
        lane = self.get(stage)
        if lane is None:
            lane = self[stage] = new_lane(stage, way, groups)
        if lane.way != way:
            now, before = (f"{sorted(needs)} by {by}, order {order}" for needs, by, order in (way, lane.way))
            raise BusError(
                f"bus: stage {stage!r} claims {now}, and before it claimed {before}; a stage keeps to one way"
            )
        return lane

    def held(
        self, claim: Claim, find: Callable[[str], StoredGroup | None], retain: bool = False
    ) -> tuple[Lane, dict[str, StoredGroup], int]:
        """A claim's lane, its units whose groups are still there, and how many are not; ``retain``: whole groups.

        Raises BusError for what its holder does not hold.
        """
        lane = self.get(claim.stage)
        if lane is None or (retain and lane.by != "group"):
            raise BusError(f"bus: ack by stage {claim.stage!r}: it must have claimed, and by groups to retain rows")
        found: dict[str, StoredGroup] = {}
        gone = 0
        for unit in claim.groups if lane.by == "group" else (row.id for row in claim.rows):
            group = find(unit if lane.by == "group" else group_of(unit))
            if group is None:
                gone += 1
            elif unit not in lane.held or lane.held[unit][1] != claim.holder:
                raise BusError(
                    f"bus: {claim.holder.name!r} acks {unit!r} for {lane.stage!r}; it must hold a claim on it"
                )
            else:
                found[unit] = group
        return lane, found, gone

    def enter(self, group: StoredGroup) -> None:
        for lane in self.values():
            lane.enter(group)

    def close(self, group: StoredGroup) -> None:
        for lane in self.values():
            lane.close(group)

    def leave(self, group: StoredGroup) -> None:
        for lane in self.values():
            lane.leave(group)

    def added(self, group: StoredGroup, rows: Sequence[StoredRow]) -> None:
        """These rows are new."""
        for lane in self.values():
            lane.wrote(group, rows)

    def wrote(self, group: StoredGroup, rows: Sequence[StoredRow], names: frozenset[str]) -> None:
        """These rows of a group got these columns, and none of them before."""
        for lane in self.values():
            if not lane.needs.isdisjoint(names):
                lane.wrote(group, rows)

    def offer_again(self, holder: Holder) -> None:
        self.claimants.discard(holder)
        for lane in self.values():
            lane.offer_again(holder)

    def call(self) -> None:
        for lane in self.values():
            lane.call()

    def waiters(self) -> list[ClaimWaiter]:
        return [waiter for lane in self.values() for waiter in lane.waiters]

    def stand_still(self) -> bool:
        """Whether every living claimant waits to claim: nobody is at work who could make room."""
        waiters = self.waiters()
        waiting = {waiter.holder for waiter in waiters if waiter.idle}
        return bool(waiters) and all(waiter.idle for waiter in waiters) and self.claimants <= waiting


def new_lane(stage: str, way: tuple[frozenset[str], By, Order], groups: Iterable[StoredGroup]) -> Lane:
    """A lane that has taken up all living groups."""
    lane = Lane(stage, *way)
    for group in groups:
        lane.enter(group)
    return lane
