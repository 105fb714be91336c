"""How the other ranks of a trainer do what rank 0 does: it says before each collective act what is next.

So one order of acts holds on all ranks, whatever calls arrive there, and a rank with nothing to do waits without a
timeout. A rank either follows for good (``follow``), or is called as rank 0 is, with each call lasting until rank 0 has
done the same; acts that come in between are done too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_core.errors import RelaxError
from relax_core.interfaces import Algorithm
from relax_core.torch.ranks import CommonError, Ranks


@dataclass(frozen=True, slots=True)
class Begin:
    """A step begins."""

    step: int


@dataclass(frozen=True, slots=True)
class Share:
    """Train this rank's share of a cut. ``units``: of the whole update, which ends where this is not None."""

    ticket: Any
    forwards: int
    units: float | None


@dataclass(frozen=True, slots=True)
class End:
    """The step ends; ``reason``: by an error of rank 0 alone."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute outputs of this rank's share of rows, in so many forwards."""

    ticket: Any
    outputs: frozenset[str]
    forwards: int


@dataclass(frozen=True, slots=True)
class Do:
    """One of ``weights``, ``save``, ``load``, ``sleep``, ``wake``, ``release``."""

    what: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked of rank 0 cannot be done, and was not begun."""

    kind: str
    reason: str


Order = Begin | Share | End | Compute | Refused | Do


class Followed(Protocol):
    """What a rank can be told to do."""

    def begin(self, step: int, algorithm: Algorithm) -> None: ...
    def train_share(self, order: Share) -> None: ...
    def end(self) -> None: ...
    def compute_share(self, order: Compute) -> None: ...
    def act(self, order: Do) -> None: ...


class Follower:
    """Of a rank that is not rank 0."""

    def __init__(self, ranks: Ranks, trainer: Followed) -> None:
        self.ranks, self.trainer = ranks, trainer
        self._called: dict[str, int] = defaultdict(int)
        """Calls of each kind so far."""
        self._done: dict[str, int] = defaultdict(int)
        self._errors: dict[tuple[str, int], Exception] = {}
        """Of acts whose call has not returned, by their number."""
        self._algorithms: dict[int, Algorithm] = {}
        self._given = asyncio.Event()
        self._lock = asyncio.Lock()
        self._always: Algorithm | None = None

    async def follow(self, algorithm: Algorithm) -> None:
        """Until rank 0 releases this rank. Errors that rank 0 raises too are left to it."""
        self._always = algorithm
        self._given.set()
        while not self._done["release"]:
            await self._next()
            self._errors.clear()

    async def step(self, step: int, algorithm: Algorithm) -> None:
        """Until rank 0 has ended the step."""
        self._algorithms[step] = algorithm
        self._given.set()
        await self.until("step")

    async def until(self, kind: str) -> None:
        """Until rank 0 has done so many acts of this kind as calls have come; raises what the act raised."""
        self._called[kind] += 1
        number = self._called[kind]
        while self._done[kind] < number:
            async with self._lock:
                if self._done[kind] < number:
                    await self._act(await asyncio.to_thread(self.ranks.hand_out))
        if error := self._errors.pop((kind, number), None):
            raise error

    def at_once(self, kind: str) -> None:
        """``until``, without giving way: for calls that are not asynchronous. Nothing else may be next."""
        if error := self._tried(self.trainer.act, self.expect(kind)):
            raise error

    def expect(self, kind: str) -> Do:
        """The next order, which must be to do this."""
        order: Order = self.ranks.hand_out()
        if not isinstance(order, Do) or order.what != kind:
            raise RelaxError(
                f"trainer: rank {self.ranks.rank} was called to {kind}, and rank 0's next act is another "
                f"({type(order).__name__}); let ranks follow() instead of calling each"
            )
        self._called[kind] += 1
        self._done[kind] += 1
        return order

    async def _next(self) -> None:
        async with self._lock:
            await self._act(await asyncio.to_thread(self.ranks.hand_out))

    async def _act(self, order: Order) -> None:
        if isinstance(order, Begin):
            algorithm = await self._algorithm(order.step)
            self.trainer.begin(order.step, algorithm)
        elif isinstance(order, Share):
            if error := self._tried(self.trainer.train_share, order):
                self._finish("step", error)
        elif isinstance(order, End):
            if order.reason is None:
                self.trainer.end()
            why = f"trainer: rank 0 ended the step: {order.reason}"
            self._finish("step", RelaxError(why) if order.reason is not None else None)
        elif isinstance(order, Refused):
            self._finish(order.kind, RelaxError(f"trainer: rank 0 refused to {order.kind}: {order.reason}"))
        elif isinstance(order, Compute):
            self._finish("forward", self._tried(self.trainer.compute_share, order))
        else:
            self._finish(order.what, self._tried(self.trainer.act, order))

    async def _algorithm(self, step: int) -> Algorithm:
        while self._always is None and step not in self._algorithms:
            self._given.clear()
            await self._given.wait()
        found = self._algorithms.pop(step, None) or self._always
        assert found is not None
        return found

    def _tried(self, act: Any, order: Order) -> Exception | None:
        """The error that every rank knows of. One that only this rank meets goes through: it cannot go on."""
        try:
            act(order)
        except CommonError as common:
            return common.error
        return None

    def _finish(self, kind: str, error: Exception | None) -> None:
        self._done[kind] += 1
        if error is not None:
            self._errors[kind, self._done[kind]] = error
