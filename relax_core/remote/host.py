"""The engine's side of its clients: each has its own ordered stream of messages, and leaves no trace when it goes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from relax_core.remote.wire import Message, describe

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, Interrupt, Pool, Request
    from relax_core.media import MediaStore
    from relax_core.weights import WeightUpdate

Builder = Callable[[], "tuple[Engine, MediaStore]"]
"""Called once where the engine is to live: an engine, not started yet, and the store from which its adapter reads
media features."""

Take = Callable[[str, Any], None]
"""Puts what a client sent of a medium under its key into the store."""


class Host:
    """An engine and what its clients share. ``take`` fits how clients pack media; by default they send features.

    Requests of guests (clients other than the owner, who restarts the engine) wait until weights were loaded: nobody
    samples from the first weights of an engine that was just started again. ``address`` gives this machine's, where
    peers of the engine may be on other ones.
    """

    def __init__(
        self,
        engine: Engine,
        media: MediaStore,
        take: Take | None = None,
        address: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.engine, self.media, self.address = engine, media, address
        self.take: Take = take or media.put
        self.loaded = asyncio.Event()


class Served:
    """One client. ``answer`` is called with (serial, None, value) or (serial, an error's name, its text)."""

    def __init__(self, host: Host, answer: Callable[..., None], guest: bool = False) -> None:
        self._host, self._answer, self._guest = host, answer, guest
        self._entered: Counter[Pool] = Counter()
        self._held: set[str] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._kinds: dict[str, Callable[..., None]] = {
            "put": self._put,
            "drop": self._drop,
            "enter": self._enter,
            "leave": self._leave,
            "generate": self._generate,
            "cancel": self._cancel,
            "call": self._call,
            "settled": self._settled,
        }

    def apply(self, messages: Iterable[Message]) -> None:
        for kind, *rest in messages:
            self._kinds[kind](*rest)

    def close(self) -> None:
        """The client is gone: what it asked for, entered and brought goes too."""
        self._answer = _nowhere
        for task in list(self._tasks.values()):
            task.cancel()
        for pool in self._entered.elements():
            self._host.engine.leave(pool)
        self._entered.clear()
        self._host.media.release(self._held)
        self._held.clear()

    def _put(self, key: str, parcel: Any) -> None:
        self._host.take(key, parcel)
        self._host.media.retain([key])
        self._held.add(key)

    def _drop(self, key: str) -> None:
        self._held.remove(key)
        self._host.media.release([key])

    def _enter(self, pool: Pool) -> None:
        self._entered[pool] += 1
        self._host.engine.enter(pool)

    def _leave(self, pool: Pool) -> None:
        self._entered[pool] -= 1
        self._host.engine.leave(pool)

    def _generate(self, serial: int, request: Request) -> None:
        self._run(serial, self._sample, request)

    def _cancel(self, serial: int) -> None:
        if task := self._tasks.get(serial):
            task.cancel()

    def _call(self, serial: int, method: str, arguments: tuple[Any, ...]) -> None:
        own: dict[str, Callable[..., Awaitable[Any]]] = {
            "load_weights": self._load_weights,
            "share_weights": self._share_weights,
        }
        self._run(serial, own.get(method) or getattr(self._host.engine, method), *arguments)

    def _settled(self, serial: int) -> None:
        self._run(serial, _nothing)  # tasks begin in the order of their making: what was asked before has begun

    async def _sample(self, request: Request) -> Any:
        if self._guest and not self._host.loaded.is_set():
            await self._host.loaded.wait()
        return await self._host.engine.generate(request)

    async def _load_weights(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        await self._host.engine.load_weights(update, interrupt)
        self._host.loaded.set()

    async def _share_weights(self, host: str | None) -> WeightUpdate:
        return await self._host.engine.share_weights(host or self._host.address())

    def _run(self, serial: int, work: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        task = asyncio.create_task(self._answered(serial, work, arguments))
        self._tasks[serial] = task
        task.add_done_callback(lambda _: self._tasks.pop(serial, None))

    async def _answered(self, serial: int, work: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        try:
            value = await work(*arguments)
        except Exception as error:
            self._answer(serial, *describe(error))
        else:
            self._answer(serial, None, value)


async def _nothing() -> None: ...


def _nowhere(*answer: Any) -> None: ...
