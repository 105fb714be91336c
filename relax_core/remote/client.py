"""The caller's side of an engine elsewhere: futures for what it is asked, and one ordered stream of messages to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Engine, Interrupt, Pool, Request
from relax_core.remote.wire import Message, Outbox, Send, receive, restore

if TYPE_CHECKING:
    from relax_core.remote.sent import SentMedia
    from relax_core.weights import WeightUpdate

READY = 0
"""The serial under which the engine's side says that it listens, and whether its versions are exact."""


class RemoteEngine(Engine):
    """What every channel shares. A subclass's ``start`` opens the channel, calls ``_open`` with a way to send messages
    and awaits ``_begin``; it passes what comes back to ``_deliver``, and calls ``_die`` when the other side is gone.

    ``enter`` and ``leave`` travel in order with the requests, so a deterministic engine samples the same bits there as
    here. With several clients, order holds within each; ``settled`` tells when the others may go on.
    """

    exact_versions = True
    where = "engine"
    """How errors call it."""

    def __init__(self, sent: SentMedia) -> None:
        super().__init__(None)
        self._sent = sent
        self._outbox: Outbox | None = None
        self._entered: Counter[Pool] = Counter()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._serial = READY
        self._begun = False
        """Whether the engine listens: before that, who is at work is only remembered."""
        self._dead: str | None = "it was not started"
        self._gone = asyncio.Event()

    # --- the channel -------------------------------------------------------------------------------------------------

    def _open(self, send: Send) -> None:
        def or_die(messages: list[Message]) -> None:
            try:
                send(messages)
            except Exception as error:  # called by the event loop, where nobody else hears of it
                self._die(f"a message to it cannot travel: {type(error).__name__}: {error}")

        self._outbox, self._begun, self._dead, self._gone = Outbox(or_die), False, None, asyncio.Event()
        self._sent.forget()

    async def _begin(self) -> None:
        """Wait until the engine listens, and say who is at work: a restarted one waits for the same parties."""
        self.exact_versions = await self._expect(READY)
        assert self._outbox is not None
        self._begun = True
        for pool in self._entered.elements():
            self._outbox.put("enter", pool)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Deliver until nothing comes any more. What cannot be read is an end, too: somebody waits for it."""
        try:
            while (answers := await receive(reader)) is not None:
                self._deliver(answers)
        except Exception as error:
            self._die(f"an answer of it cannot be read: {type(error).__name__}: {error}")

    def _deliver(self, answers: Iterable[Message]) -> None:
        for serial, name, value in answers:
            future = self._futures.get(serial)
            if future is None or future.done():
                continue
            if name is None:
                future.set_result(value)
            else:
                future.set_exception(restore(name, value, self.where))

    def _die(self, reason: str) -> None:
        """Nothing comes back any more: whoever waits gets an EngineError."""
        self._dead = self._dead or reason
        self._outbox, self._begun = None, False
        self._gone.set()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineError(f"{self.where}: request lost: {self._dead}"))

    def _say(self, messages: Iterable[Message]) -> None:
        if self._outbox is not None:
            for message in messages:
                self._outbox.put(*message)

    def _next(self) -> int:
        if self._dead is not None:
            raise EngineError(f"{self.where}: it cannot serve: {self._dead}; start it again")
        if not self._begun:
            raise EngineError(f"{self.where}: it cannot serve: it is being started; wait until start has returned")
        self._serial += 1
        return self._serial

    async def _call(self, method: str, *arguments: Any) -> Any:
        serial = self._next()
        self._say([("call", serial, method, arguments)])
        return await self._expect(serial)

    async def _expect(self, serial: int) -> Any:
        future = self._futures[serial] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._futures.pop(serial, None)

    # --- the interface -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        keys = [ref.key for ref in request.prompt.media]
        serial, outbox = self._next(), self._outbox
        self._say([*self._sent.use(keys), ("generate", serial, request)])
        try:
            completion: Completion = await self._expect(serial)
            return completion
        except asyncio.CancelledError:
            if outbox is self._outbox:
                self._say([("cancel", serial)])
            raise
        finally:
            if outbox is self._outbox:  # else another engine answers now, which was never asked
                self._say(self._sent.done(keys))

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        await self._call("load_weights", update, interrupt)

    async def share_weights(self, host: str | None = None) -> WeightUpdate:
        update: WeightUpdate = await self._call("share_weights", host)
        return update

    def enter(self, pool: Pool) -> None:
        self._entered[pool] += 1
        if self._begun:
            self._say([("enter", pool)])

    def leave(self, pool: Pool) -> None:
        self._entered[pool] -= 1
        if self._begun:
            self._say([("leave", pool)])

    async def settled(self) -> None:
        serial = self._next()
        self._say([("settled", serial)])
        await self._expect(serial)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def died(self) -> str:
        await self._gone.wait()
        return f"{self.where}: {self._dead}"

    async def health(self) -> Mapping[str, float]:
        gauges: Mapping[str, float] = await self._call("health")
        return gauges
