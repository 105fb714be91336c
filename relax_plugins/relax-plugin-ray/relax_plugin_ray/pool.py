"""Equal actors beside each other that remember nothing: a call goes to the least busy, one that dies is made anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from relax_core.errors import RelaxError
from relax_core.replica import Restarts

T = TypeVar("T")
Actor = Any
"""A handle."""
WITHIN_S = 600.0
"""Restarts within this time count together."""
DELAY_S = 0.5
"""Before the second restart in a row; doubled for each further one."""


@dataclass(slots=True)
class _Worker:
    index: int
    restarts: Restarts
    actor: Actor = None
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _just_ready(actor: Actor) -> None:
    await answer(actor.ready.remote())


class Pool:
    """``create`` makes the actor of a place, ``ready`` makes it ready. ``role``: how messages call them."""

    def __init__(
        self,
        role: str,
        create: Callable[[int], Actor],
        replicas: int,
        most_restarts: int,
        note: Callable[[str], None],
        ready: Callable[[Actor], Awaitable[None]] = _just_ready,
    ) -> None:
        self.role, self._create, self._note, self._ready = role, create, note, ready
        self._workers = [_Worker(i, Restarts(most_restarts, WITHIN_S, DELAY_S)) for i in range(replicas)]

    @property
    def actors(self) -> list[Actor]:
        return [worker.actor for worker in self._workers]

    async def start(self, start_s: float) -> None:
        """Make all actors, and wait until they are ready, for so many seconds. Raises what one of them raised."""
        for worker in self._workers:
            worker.actor = self._create(worker.index)
        try:
            async with asyncio.timeout(start_s):
                await asyncio.gather(*(self._ready(worker.actor) for worker in self._workers))
        except TimeoutError:
            raise RelaxError(
                f"{self.role}: it was not ready within {start_s:g} s: see its log, or raise runtime.start_s"
            ) from None
        except RayActorError as error:
            raise RelaxError(f"{self.role}: it died while it was built ({gist(error)}); see its log") from error

    async def call(self, use: Callable[[Actor], Awaitable[T]]) -> T:
        """What ``use`` gives with the least busy actor, as often as actors die in it."""
        return await self._call(min(self._workers, key=lambda worker: worker.calls), use)

    async def all(self, use: Callable[[Actor], Awaitable[T]]) -> list[T]:
        """What ``use`` gives with every actor, as often as one dies in it."""
        return list(await asyncio.gather(*(self._call(worker, use) for worker in self._workers)))

    async def _call(self, worker: _Worker, use: Callable[[Actor], Awaitable[T]]) -> T:
        worker.calls += 1
        try:
            while True:
                actor = worker.actor
                try:
                    return await use(actor)
                except RayActorError as error:
                    await self._revive(worker, actor, error)
                except RayTaskError as error:
                    raise error.cause from None
        finally:
            worker.calls -= 1

    async def _revive(self, worker: _Worker, dead: Actor, error: RayActorError) -> None:
        """Start the actor again, once for all calls that it took with it."""
        async with worker.lock:
            while worker.actor is dead:
                ray.kill(dead)
                reason = gist(error)
                delay = worker.restarts.delay(asyncio.get_running_loop().time())
                if delay is None:
                    raise RelaxError(
                        f"{self.role} {worker.index}: it died once more after {worker.restarts}, the last time: "
                        f"{reason}; look at its log, or raise runtime.restarts"
                    ) from error
                self._note(f"{self.role} {worker.index} died ({reason}): it is started again, its calls are made again")
                await asyncio.sleep(delay)
                actor = self._create(worker.index)
                try:
                    await self._ready(actor)
                    worker.actor = actor
                except RayActorError as again:
                    error = again

    async def each(self, method: str) -> None:
        """Call a method of every actor; one that is dead needs it no more."""
        calls = [getattr(w.actor, method).remote() for w in self._workers if w.actor is not None]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, RayActorError):
                raise result

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of every actor and wait for none; those made later were told by who makes them."""
        for worker in self._workers:
            if worker.actor is not None:
                getattr(worker.actor, method).remote(*arguments)

    def stop(self) -> None:
        for worker in self._workers:
            if worker.actor is not None:
                ray.kill(worker.actor)
                worker.actor = None


async def answer(reference: Any) -> Any:
    """What an actor's call gives. Raises what it raised there, as it was raised."""
    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from None


def gist(error: BaseException) -> str:
    """One of Ray's errors, which have many lines, in one."""
    noise = ("class_name:", "actor_id:", "namespace:", "ip:", "pid:", "name:")
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(noise))[:300]
