"""A trainer, of policy or critic, whose ranks are actors: the controller's side, which streams rank 0 what to train."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from relax_core.errors import RelaxError
from relax_core.interfaces import Algorithm, Columns, Cut, Row, StepResult, Trainer
from relax_plugin_ray.pool import gist
from relax_plugin_ray.rank import Facts
from relax_plugin_ray.rows import packed

if TYPE_CHECKING:
    import torch

    from relax_core.torch.pieces import Pieces
    from relax_core.types import Version
    from relax_core.weights import WeightUpdate
    from relax_plugin_ray.media import SharedMedia

T = TypeVar("T")
Actor = Any
AHEAD = 4
"""Cuts on their way or in training, at most; rank 0 must never wait for the next one that is there."""
_GRACE_S = 3.0
"""How long a rank's death may take to be told, and how long a step that is given up may take to end."""


class TrainerGroup(Trainer):
    """Ranks that train together; for the controller one trainer.

    ``create`` makes the actor of a rank (see ``RankActor``). ``media``: the controller's store. A rank that dies ends
    the group: whatever is asked of it raises RelaxError within seconds, and goes on from a checkpoint in a new group.
    """

    def __init__(
        self,
        create: Callable[[int], Actor],
        size: int,
        media: SharedMedia,
        start_s: float = 300.0,
        patience_s: float = 600.0,
        role: str = "trainer",
    ) -> None:
        """``start_s``: for all ranks to be ready. ``patience_s``: how long one rank waits for another.

        ``role``: what errors call it.
        """
        super().__init__(None)
        self._role = role
        self._create, self._size, self._media = create, size, media
        self._start_s, self._patience_s = start_s, patience_s
        self._ranks: list[Actor] = []
        self._lives: list[Future[Any]] = []
        """One for each rank, which ends when the rank does."""
        self._lost: RelaxError | None = RelaxError(f"{role}: its ranks were not started")
        self._facts = Facts(None, 0, frozenset())
        self._pieces: Pieces | None = None
        self._tickets = itertools.count()

    # --- beginning and end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build the trainer on every rank. Raises what a rank raised, and then nothing is left running."""
        from relax_core.torch.pieces import Pieces

        self._ranks = [self._create(rank) for rank in range(self._size)]
        self._lost = None
        try:
            async with asyncio.timeout(self._start_s):
                self._facts = await self._begin()
        except TimeoutError:
            self._end()
            raise RelaxError(
                f"{self._role}: {self._size} ranks were not ready within {self._start_s:g} s: see whether the cluster "
                "has room for them, or raise runtime.start_s"
            ) from None
        except BaseException:
            self._end()
            raise
        if self._facts.kind is not None:
            self._pieces = Pieces(self._facts.kind, self._facts.budget)
        self._lives = [rank.live.remote().future() for rank in self._ranks]
        self._ended = asyncio.ensure_future(_first_of(self._lives))

    async def _begin(self) -> Facts:
        address = await self._of(0, self._ranks[0].address.remote())
        calls = [rank.ready.remote(address, self._ranks, self._patience_s) for rank in self._ranks]
        waits = [asyncio.ensure_future(self._of(i, call)) for i, call in enumerate(calls)]
        try:
            facts: Facts = (await asyncio.gather(*waits))[0]
            return facts
        finally:
            for wait in waits:
                wait.cancel()

    async def _of(self, rank: int, reference: Any) -> Any:
        try:
            return await reference
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise self._died(rank, error) from error

    async def stop(self) -> None:
        """End all ranks. Safe at any time, whatever they are doing."""
        if self._ranks and self._lost is None:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(_value(self._ranks[0].close.remote()), _GRACE_S)
        self._lost = self._lost or RelaxError(f"{self._role}: its ranks were ended")
        self._end()

    def _end(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    # --- micro-batches ------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        return self._facts.budget

    def cost(self, rows: Sequence[Row]) -> int:
        if self._pieces is not None:
            return self._pieces.cost(rows)
        return int(self._blocking("cost", packed(rows, self._media)))

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """See ``Trainer.forward``; may be asked while a step runs, and is then computed between its cuts."""
        found: list[Columns] = await self._ask("forward", packed(rows, self._media), outputs)
        return found

    # --- a step -------------------------------------------------------------------------------------------------------

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        """See ``Trainer.step``. Rank 0 has an algorithm of its own: ``algorithm`` is that of the run file.

        Each cut is sent when the plan gives it, so that training begins before the plan is complete; the plan is asked
        for no more while ``AHEAD`` cuts are not trained yet.
        """
        if self._pieces is not None:
            self._pieces.clear()
        ticket = next(self._tickets)
        whole: asyncio.Future[StepResult] = asyncio.ensure_future(self._ask("step", ticket, step))
        try:
            await self._stream(ticket, plan, whole)
            return await whole
        except asyncio.CancelledError:
            self._abandon(ticket, "cancelled")
            whole.cancel()
            raise
        except BaseException as error:
            if not whole.done():  # the plan failed, not the training
                self._abandon(ticket, f"its plan failed: {type(error).__name__}")
                await asyncio.wait({whole}, timeout=_GRACE_S)
            if not whole.cancel():
                whole.exception()
            raise

    async def _stream(self, ticket: int, plan: AsyncIterator[Cut], whole: asyncio.Future[StepResult]) -> None:
        flying: deque[Any] = deque()
        for number in itertools.count():
            cut = await _unless_ended(_following(plan), whole)
            if cut is None:
                self._send(ticket, number, None, False)
                return
            flying.append(self._send(ticket, number, packed(cut.rows, self._media), cut.last))
            if len(flying) == AHEAD:
                await _unless_ended(self._answered(flying.popleft()), whole)

    def _send(self, ticket: int, number: int, table: Any, last: bool) -> Any:
        if self._lost is not None:
            raise self._lost
        return self._ranks[0].cut.remote(ticket, number, table, last)

    def _abandon(self, ticket: int, why: str) -> None:
        if self._lost is None:
            self._ranks[0].abandon.remote(ticket, f"the step was abandoned: {why}")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def publish(self, version: Version, blank: bool = False) -> WeightUpdate:
        """Rank 0 copies the weights, or zeros for them, to where the run's transport has them, as this version."""
        update: WeightUpdate = await self._ask("publish", version, blank)
        return update

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them are copied to this process first: ``publish`` is what moves them to engines."""
        yield from self._blocking("weights")

    def frozen_names(self) -> frozenset[str]:
        return self._facts.frozen

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    async def counters(self) -> list[dict[str, int]]:
        """Of each rank: ``RankActor.counters``."""
        return list(await asyncio.gather(*(self._ask("counters", rank=i) for i in range(self._size))))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Blocks. The folder must be the same one for rank 0's machine; so must that of ``load`` for every rank's."""
        self._blocking("save", folder.absolute())

    def load(self, folder: Path) -> None:
        """Blocks."""
        self._blocking("load", folder.absolute())
        for rank in range(self._size):
            self._blocking("load_callbacks", folder.absolute(), rank=rank)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, method: str, arguments: tuple[Any, ...], rank: int) -> Any:
        if self._lost is not None:
            raise self._lost
        return getattr(self._ranks[rank], method).remote(*arguments)

    async def _ask(self, method: str, *arguments: Any, rank: int = 0) -> Any:
        return await self._answered(self._call(method, arguments, rank))

    async def _answered(self, reference: Any) -> Any:
        """What a call gives. Raises what it raised, or that a rank died, whichever is the cause of the other."""
        call: Future[Any] = reference.future()
        await asyncio.wait({_quiet(call), self._ended}, return_when=FIRST_COMPLETED)
        return self._outcome(call) if self._sound(call) else await asyncio.to_thread(self._outcome, call)

    def _blocking(self, method: str, *arguments: Any, rank: int = 0) -> Any:
        call: Future[Any] = self._call(method, arguments, rank).future()
        concurrent.futures.wait([call, *self._lives], return_when=FIRST_COMPLETED)
        return self._outcome(call)

    @staticmethod
    def _sound(call: Future[Any]) -> bool:
        return call.done() and call.exception() is None

    def _outcome(self, call: Future[Any]) -> Any:
        """Of a call that has ended, or of which a rank has ended. May wait for the news of a rank's death."""
        if self._sound(call):
            return call.result()
        own = call.exception() if call.done() else None
        lost = self._lost or self._why_lost(own)
        if lost is not None:
            self._lost = lost
            self._end()
            raise lost from own
        assert own is not None
        raise _cause(own) from None

    def _why_lost(self, own: BaseException | None) -> RelaxError | None:
        """Whether a rank has ended, and why: a death is told a little later than what it does to the other ranks."""
        from relax_core.torch.ranks import LostRanksError

        cause = None if own is None else _cause(own)
        waiting = set(self._lives)
        if isinstance(cause, LostRanksError | RayActorError) or any(life.done() for life in self._lives):
            deadline = _deadline(_GRACE_S)
            while (dead := self._dead()) is None and waiting and (left := deadline()) > 0:
                _, waiting = concurrent.futures.wait(waiting, left, FIRST_COMPLETED)
            if dead is not None:
                return dead
        elif cause is not None:
            return None
        for rank, life in enumerate(self._lives):
            if life.done():
                error = life.exception()
                said = "it was released" if error is None else gist(_cause(error))
                return RelaxError(f"{self._role} rank {rank} ended: {said}; {_ADVICE}")
        return RelaxError(f"{self._role}: {gist(cause)}; {_ADVICE}") if cause is not None else None

    def _dead(self) -> RelaxError | None:
        for rank, life in enumerate(self._lives):
            if life.done() and isinstance(error := life.exception(), RayActorError):
                return self._died(rank, error)
        return None

    def _died(self, rank: int, error: RayActorError) -> RelaxError:
        return RelaxError(f"{self._role} rank {rank} died ({gist(error)}); {_ADVICE}")


_ADVICE = "the same command goes on from the newest checkpoint"


def _deadline(seconds: float) -> Callable[[], float]:
    """The seconds left."""
    import time

    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


def _cause(error: BaseException) -> BaseException:
    """What was raised in the actor, as it was raised there."""
    return cast(BaseException, error.cause) if isinstance(error, RayTaskError) else error


async def _first_of(lives: Sequence[Future[Any]]) -> None:
    await asyncio.wait([_quiet(life) for life in lives], return_when=FIRST_COMPLETED)


def _quiet(call: Future[Any]) -> asyncio.Future[Any]:
    """Ends with the call; how it ended is asked of the call itself."""
    wrapped = asyncio.wrap_future(call)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return wrapped


async def _value(reference: Any) -> Any:
    return await reference


async def _following(plan: AsyncIterator[Cut]) -> Cut | None:
    """The next cut; None at the plan's end."""
    return await anext(plan, None)


async def _unless_ended(work: Awaitable[T], whole: asyncio.Future[Any]) -> T:
    """What ``work`` gives; what ``whole`` raises if that ends before, and then the work is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, whole}, return_when=FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    whole.result()
    raise RelaxError("trainer: rank 0 ended the step before its plan had ended")
