"""The data bus: an in-memory column store between stages. Everything waits for events; nothing polls.

Groups are opened, filled with rows, closed, and from then on claimed by stages, which add columns and acknowledge.
Rules that hold everywhere:

* A call by a holder that was declared dead raises FencedError, one after ``close`` BusClosed, one that breaks the
  contract BusError; then nothing of it was done. A wait that is cancelled has done nothing either.
* Groups leave by ``evict``, or trained by ``ack(retain=...)``. What a living holder still sends for one that has left
  is ignored: return values tell, and ``late`` counts it. (The last 65,536 are known by name, older ones are an error.)
* Arrays are not copied: nobody may change what was put. All calls belong on one event loop's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_core.bus_bound import Bound, PutWaiter
from relax_core.bus_lane import By, ClaimWaiter, Lanes, Order, Waiter, new_lane
from relax_core.bus_state import (
    BusClosed,
    BusError,
    BusState,
    Claim,
    Holder,
    Holders,
    StoredGroup,
    merge,
    size_of,
)
from relax_core.bus_store import More, Store
from relax_core.errors import FencedError
from relax_core.interfaces import Columns, Row

__all__ = ["Bus", "BusClosed", "BusError", "BusState", "By", "Claim", "Holder", "Order", "merge"]


class Bus:
    """See the module. ``max_rows`` and ``max_bytes`` bound what is held; see ``put`` for who waits.

    Counters: ``late`` rows, closings and acks that were ignored because their group had left; ``repeated`` columns that
    were dropped because a dead holder had written them before; ``overfull`` rows let in beyond the bound.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.late = 0
        self.repeated = 0
        self.overfull = 0
        self._bound = Bound(max_rows, max_bytes, self._stuck)
        self._holders = Holders()
        self._store = Store(self._holders.lives)
        self._lanes = Lanes()
        self._closed = False

    # --- holders ------------------------------------------------------------------------------------------------------

    def register(self, name: str) -> Holder:
        """A new incarnation of ``name``. An earlier one is declared dead."""
        earlier = self._holders.living(name)
        if earlier is not None:
            self.declare_dead(earlier)
        return self._holders.add(name)

    def declare_dead(self, holder: Holder) -> None:
        """Offer its claims again and refuse whatever it still sends; its waits end with FencedError.

        Also for a holder that will claim no more (it would count as being at work for ever: see ``put``).
        Groups that it had opened and not closed stay: see ``orphans``.
        """
        if not self._holders.lives(holder):
            return
        self._holders.bury(holder)
        self._lanes.offer_again(holder)
        for waiter in self._waiters():
            if waiter.holder == holder:
                waiter.wake()
        self._moved()

    def orphans(self) -> list[str]:
        """Open groups whose holder is dead: nobody will close them, so evict them (and play them again)."""
        groups = self._store.groups
        return [unit for unit in self._store.open.units() if not self._holders.lives(groups[unit].holder)]

    # --- groups and rows ----------------------------------------------------------------------------------------------

    async def open_group(self, group: str, serial: int, task: Any, holder: Holder) -> None:
        """A group got its slot. ``serial`` orders groups by their start.

        The id is new in this run, or that of a group that was evicted while open. Raises BusError otherwise.
        """
        self._check(holder)
        self._enter(StoredGroup(group, serial, task, holder))

    async def put(self, columns: Mapping[str, Columns], holder: Holder, group: str | None = None) -> int:
        """Write columns by row id: with ``group`` new rows of that open group, else more columns of rows already there.

        All or nothing, and write-once. Only what a dead holder had written before it could acknowledge may come again:
        then the first value stays. Row ids are ``<group>/<member>/<sample>``; claims give rows in the order put here.
        More columns never wait. New rows wait while the bound is reached, those of the group that started first before
        all others. When everything stands still (every living holder that ever claimed waits to claim) the open group
        that started first is let in beyond the bound: a full bus whose consumers wait for it would never move.

        Returns how many of the rows were there to be written; the others belong to groups that have left.
        """
        self._check(holder)
        if group is None:
            return self._put_more(columns, holder)
        target = self._store.find(group)
        if target is None or not columns:
            self.late += len(columns)
            return 0
        nbytes = sum(size_of(c) for c in columns.values())
        waiter = PutWaiter(holder=holder, group=target, rows=len(columns), nbytes=nbytes)
        self._bound.join(waiter)
        try:
            self._store.check_new(target, columns)
            while not (waiter.let_in or self._bound.fits(waiter)):
                self._bound.poke()
                await waiter.wait()
                self._check(holder)
                if self._store.groups.get(group) is not target:
                    self.late += len(columns)
                    return 0
                self._store.check_new(target, columns)
            self.overfull += 0 if self._bound.fits(waiter) else len(columns)
            added = self._store.add_rows(target, columns, holder)
            self._bound.add(len(added), sum(row.nbytes for row in added))
            self._lanes.added(target, added)
        finally:
            self._bound.leave(waiter)
        return len(columns)

    async def close_group(self, group: str, n_rows: int, holder: Holder) -> bool:
        """All plays ended and gave ``n_rows`` rows: stages may claim. Returns False if the group has left.

        A group of 0 rows lacks no column, so every stage that claims groups gets it at once; evict what nobody wants.
        """
        self._check(holder)
        target = self._store.find(group)
        if target is None:
            self.late += 1
            return False
        self._store.close(target, n_rows)
        self._bound.wake(target)
        self._lanes.close(target)
        self._moved()
        return True

    async def evict(self, group: str) -> list[Row]:
        """The group and all its rows disappear, claimed or not. Returns the rows, whose media can be given back.

        A group that has left, or was trained, or is unknown: nothing happens and nothing is returned.
        """
        target = self._store.groups.get(group)
        if target is None:
            return []
        self._store.leave(target)
        self._lanes.leave(target)
        self._bound.add(-len(target.rows), -target.nbytes)
        self._bound.wake(target)
        self._moved()
        return target.views()

    # --- stages -------------------------------------------------------------------------------------------------------

    async def claim(
        self,
        stage: str,
        needs: frozenset[str],
        count: int,
        by: By,
        holder: Holder,
        order: Order = "any",
        exact: bool = False,
    ) -> Claim:
        """Take up to ``count`` units (rows, or whole groups) that have all ``needs``; waits until there is one.

        Only closed groups are claimed. A unit goes to one living holder at a time, and is its own until it acks or is
        declared dead, however slow it is. ``order``: ``any`` takes what is ready, lowest serial first; ``started`` the
        ready prefix of the living groups by serial: one that is not ready blocks all later ones; ``finished`` goes by
        the time at which the needs became complete. ``exact``: waits until ``count`` units can be had.

        A stage always claims with the same needs, unit and order (else BusError); its waiters are served in turn.
        """
        self._check(holder)
        if count < 1:
            raise BusError(f"bus: stage {stage!r} claims {count} {by}s; ask for at least 1")
        lane = self._lanes.of(stage, (needs, by, order), self._store.groups.values())
        self._lanes.claimants.add(holder)
        waiter = ClaimWaiter(holder=holder, count=count, exact=exact)
        lane.waiters.append(waiter)
        try:
            while lane.waiters[0] is not waiter or not (found := lane.available(count, exact)):
                self._bound.poke()
                await waiter.wait()
                self._check(holder)
            groups, rows = self._store.views(lane.take(found, holder), by, sorted(needs))
            return Claim(stage, holder, tuple(rows), tuple(groups))
        finally:
            lane.waiters.remove(waiter)
            lane.call()

    async def ack(self, claim: Claim, retain: int | None = None) -> tuple[str, ...]:
        """The stage is done with these units; a part of a claim, or several merged, will do. All or nothing.

        ``retain`` (by groups only): the groups are trained in that step and leave; their rows stay, and count in the
        bound, until ``release`` covers the step. Returns the groups that were still there.
        """
        self._check(claim.holder)
        lane, found, gone = self._lanes.held(claim, self._store.find, retain is not None)
        self.late += gone
        for unit, group in found.items():
            lane.free(unit)
            group.acked.setdefault(lane.stage, set()).add(unit)
            if retain is not None:
                self._store.retain(group, retain)
                self._lanes.leave(group)
        self._moved()
        return tuple(dict.fromkeys(group.id for group in found.values()))

    async def finish(self, claim: Claim, columns: Mapping[str, Columns]) -> tuple[str, ...]:
        """``put`` what a stage made of its claim, and ``ack`` it, in one. Never waits."""
        self._check(claim.holder)
        self._lanes.held(claim, self._store.find)
        await self.put(columns, claim.holder)
        return await self.ack(claim)

    # --- trained rows, snapshots, the end -----------------------------------------------------------------------------

    def retained(self, step: int) -> list[Row]:
        """The rows trained in ``step`` that no snapshot covers yet, in the order acknowledged, with all columns."""
        return [row.view(group) for group, row in self._store.retained.get(step, [])]

    def release(self, step: int) -> list[Row]:
        """A durable snapshot covers every step up to ``step``: free their rows and return them, to give media back."""
        rows, nbytes = self._store.release(step)
        self._bound.add(-len(rows), -nbytes)
        self._bound.poke()
        return rows

    def snapshot(self) -> BusState:
        """Closed groups that are not trained, in serial order, with columns and acks. Arrays are shared: pickle it.

        Claims are not in it (they are offered again), nor open groups (they are played again), nor retained rows.
        """
        return self._store.snapshot(self._holders.incarnations)

    def restore(self, state: BusState) -> None:
        """Take the groups of a snapshot into a bus that has none. Whoever wrote their columns counts as dead."""
        if self._store.groups:
            raise BusError(f"bus: restore found {self.groups} groups here; restore before the first group is opened")
        self._store.clock = state.clock
        self._holders.count_on(state.incarnations)
        for saved in state.groups:
            group = saved.copy(keep_holders=False)
            self._bound.add(len(group.rows), group.nbytes)
            self._enter(group)
        self._moved()

    async def close(self) -> None:
        """Every wait ends with BusClosed, and so does every later open, put, close_group, claim and ack."""
        self._closed = True
        for waiter in self._waiters():
            waiter.wake()

    # --- gauges -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held, the retained ones included."""
        return self._bound.rows

    @property
    def bytes(self) -> int:
        """Bytes of the rows held: see ``size_of``."""
        return self._bound.bytes

    @property
    def retained_rows(self) -> int:
        return sum(map(len, self._store.retained.values()))

    @property
    def groups(self) -> int:
        """Living groups: open, or closed and not trained."""
        return len(self._store.groups)

    @property
    def full(self) -> bool:
        """The bound is reached, or a producer waits: with ``retained_rows``, a reason for an early checkpoint."""
        return self._bound.reached

    def holds(self, group: str) -> bool:
        """Whether the group is open, or closed and not trained."""
        return group in self._store.groups

    def held_rows(self) -> list[Row]:
        """The rows of living groups, with all columns."""
        return [row for group in self._store.groups.values() for row in group.views()]

    def ready(self, stage: str, needs: frozenset[str], by: By = "group") -> int:
        """How many units a claim of this stage could get now. For one that never claimed it looks through all rows."""
        lane = self._lanes.get(stage)
        if lane is None or (lane.needs, lane.by) != (needs, by):
            lane = new_lane(stage, (needs, by, "any"), self._store.groups.values())
        return lane.available(len(lane.ready), exact=False)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, holder: Holder) -> None:
        if self._closed:
            raise BusClosed("the bus is closed")
        if not self._holders.lives(holder):
            raise FencedError(f"bus: incarnation {holder.incarnation} of {holder.name!r} is dead; register a new one")

    def _waiters(self) -> list[Waiter]:
        return [*self._bound.queue, *self._lanes.waiters()]

    def _moved(self) -> None:
        """Something became claimable, or room: let those who wait look."""
        self._lanes.call()
        self._bound.poke()

    def _enter(self, group: StoredGroup) -> None:
        self._store.enter(group)
        self._lanes.enter(group)

    def _put_more(self, columns: Mapping[str, Columns], holder: Holder) -> int:
        plan = self._store.plan(columns)
        self.late += len(columns) - len(plan)
        self.repeated += sum(len(columns[more.row.id]) - len(more.names) for more in plan)
        self._bound.add(0, self._store.write(plan, holder))
        alike: dict[tuple[str, frozenset[str]], list[More]] = {}
        for more in plan:
            alike.setdefault((more.group.id, more.names), []).append(more)
        for some in alike.values():
            self._lanes.wrote(some[0].group, [more.row for more in some], some[0].names)
        self._moved()
        return len(plan)

    def _stuck(self, waiter: PutWaiter) -> bool:
        """Whether a put that finds no room belongs to the open group that started first, and all stands still."""
        first = self._store.open.first.unit if len(self._store.open) else None
        return first == waiter.group.id and self._lanes.stand_still()
