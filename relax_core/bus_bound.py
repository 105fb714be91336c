"""The bus's bound in rows and bytes, and the producers that wait for room, those of the oldest group first."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from relax_core.bus_lane import Waiter
from relax_core.bus_state import StoredGroup


@dataclass(eq=False, slots=True, kw_only=True)
class PutWaiter(Waiter):
    """A put of new rows. ``arrival`` orders the puts of one group; ``let_in``: it may pass the bound."""

    group: StoredGroup
    rows: int
    nbytes: int
    arrival: int = 0
    let_in: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.group.serial, self.arrival)


class Bound:
    """Counts what is on the bus. Only the first in the queue may enter: nobody starves behind smaller puts.

    ``stuck`` says of the first whether nothing else could ever move before it does; then it is let in all the same.
    """

    def __init__(self, max_rows: int, max_bytes: int, stuck: Callable[[PutWaiter], bool]) -> None:
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.rows = 0
        self.bytes = 0
        self.queue: list[PutWaiter] = []
        self._stuck = stuck
        self._arrivals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poked = False

    @property
    def reached(self) -> bool:
        return bool(self.queue) or self.rows >= self.max_rows or self.bytes >= self.max_bytes

    def add(self, rows: int, nbytes: int) -> None:
        """Count what came; negative numbers for what went."""
        self.rows += rows
        self.bytes += nbytes

    def join(self, waiter: PutWaiter) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrivals += 1
        waiter.arrival = self._arrivals
        insort(self.queue, waiter, key=lambda w: w.key)

    def leave(self, waiter: PutWaiter) -> None:
        self.queue.remove(waiter)
        self.poke()

    def fits(self, waiter: PutWaiter) -> bool:
        """Whether there is room for it, and nobody is before it."""
        room = self.rows + waiter.rows <= self.max_rows and self.bytes + waiter.nbytes <= self.max_bytes
        return room and self.queue[0] is waiter

    def wake(self, group: StoredGroup) -> None:
        """Something happened to this group: its puts must look again."""
        for waiter in self.queue:
            if waiter.group is group:
                waiter.wake()

    def poke(self) -> None:
        """Look at the first in the queue, once all who were woken before in this turn of the event loop have moved."""
        if self.queue and not self._poked and self._loop is not None:
            self._poked = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._poked = False
        if self.queue and self.queue[0].idle:
            first = self.queue[0]
            if not self.fits(first):
                first.let_in = self._stuck(first)
            if first.let_in or self.fits(first):
                first.wake()
