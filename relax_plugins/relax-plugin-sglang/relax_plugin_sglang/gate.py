"""Who may be with the server: so many requests at once, those that wait in their order, and none while it is shut."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush

from relax_core.errors import EngineError


class Gate:
    """Passed by ``enter``, left by ``leave``. Shut for any number of reasons, and open when none is left."""

    def __init__(self, room: int) -> None:
        self.inside = 0
        self._room = room
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []
        self._serial = 0
        self._reasons: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._broken: str | None = None

    @property
    def waiting(self) -> int:
        return sum(not future.done() for *_, future in self._waiting)

    async def enter(self, order: tuple[int, ...] = ()) -> None:
        """Raises EngineError when nobody will ever pass again."""
        if self._broken is not None:
            raise EngineError(self._broken)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serial += 1
        heappush(self._waiting, (order, self._serial, future))
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.leave()  # it was let in, and never got to know
            raise

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()
        self._let_in()

    def shut(self, reason: str) -> None:
        self._reasons.add(reason)

    def open(self, reason: str) -> None:
        self._reasons.discard(reason)
        self._let_in()

    async def empty(self) -> None:
        """Return when nobody is inside. Raises EngineError when nobody will ever pass again."""
        await self._empty.wait()
        if self._broken is not None:
            raise EngineError(self._broken)

    def fail(self, reason: str) -> None:
        """Nobody passes any more; those that wait get an EngineError."""
        self._broken = self._broken or reason
        self._empty.set()
        for *_, future in self._waiting:
            if not future.done():
                future.set_exception(EngineError(self._broken))
        self._waiting.clear()

    def _let_in(self) -> None:
        while self._waiting and not self._reasons and self.inside < self._room:
            future = heappop(self._waiting)[-1]
            if not future.done():
                self.inside += 1
                self._empty.clear()
                future.set_result(None)
