"""An engine in a process of its own, behind the same interface: the caller's event loop never waits for a decode step.

The child rebuilds its engine by a picklable builder. Requests, completions and weight *handles* cross a socket pair;
media features cross once for each key. The end of one side is an end of file for the other, so neither is left behind.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.torch.wire import Message, Outbox, describe, receive, restore

if TYPE_CHECKING:
    from relax_core.media import MediaStore
    from relax_core.weights import WeightUpdate

Builder = Callable[[], "tuple[Engine, MediaStore]"]
"""Called once in the child: an engine, not started yet, and the store from which its adapter reads media features."""

_GRACE_S = 3.0
"""How long ``stop`` waits for the child to end by itself, and then after SIGTERM."""


class ProcessEngine(Engine):
    """Forwards everything to the engine that ``builder`` makes in a child process.

    ``enter`` and ``leave`` travel in order with the requests, so a deterministic engine samples the same bits there as
    here. ``media_bytes`` bounds the features that the child keeps for requests to come.
    """

    exact_versions = True

    def __init__(self, builder: Builder, media: MediaStore, media_bytes: int = 1_000_000_000) -> None:
        super().__init__(None)
        self._builder, self._sent = builder, _SentMedia(media, media_bytes)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._outbox: Outbox | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._entered: Counter[Literal["train", "eval"]] = Counter()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._serial = 0
        self._dead: str | None = "it was not started"

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the child and wait until its engine serves. Raises what its builder or start raised."""
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_main, args=(theirs, self._builder), name="relax-engine", daemon=True)
        process.start()
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._process, self._outbox, self._dead = process, Outbox(self._writer), None
        self._sent.forget()
        self._reading = asyncio.create_task(self._read(reader), name="engine process")
        try:
            self.exact_versions = await self._expect(_READY)
            for pool in self._entered.elements():  # a restarted child waits for the same parties
                self._outbox.put("enter", pool)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the child, by force if it does not listen. Whatever still waits gets an EngineError."""
        process = self._process
        if process is None:
            return
        if self._outbox is not None and self._dead is None:
            self._outbox.put("stop")
        self._die("it was stopped")
        for force in (process.terminate, process.kill):
            await asyncio.to_thread(process.join, _GRACE_S)
            if process.exitcode is None:
                force()
        await asyncio.to_thread(process.join)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        self._process = self._reading = self._writer = self._outbox = None

    # --- the interface -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        keys = [ref.key for ref in request.prompt.media]
        serial, outbox = self._next()
        for message in self._sent.use(keys):
            outbox.put(*message)
        outbox.put("generate", serial, request)
        try:
            completion: Completion = await self._expect(serial)
            return completion
        except asyncio.CancelledError:
            outbox.put("cancel", serial)
            raise
        finally:
            for message in self._sent.done(keys):
                outbox.put(*message)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        await self._call("load_weights", update, interrupt)

    def enter(self, pool: Literal["train", "eval"]) -> None:
        self._entered[pool] += 1
        if self._outbox is not None:
            self._outbox.put("enter", pool)

    def leave(self, pool: Literal["train", "eval"]) -> None:
        self._entered[pool] -= 1
        if self._outbox is not None:
            self._outbox.put("leave", pool)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def health(self) -> Mapping[str, float]:
        gauges: Mapping[str, float] = await self._call("health")
        return gauges

    # --- the wire ----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, Outbox]:
        if self._dead is not None or self._outbox is None:
            raise EngineError(f"engine process: it cannot serve: {self._dead}; start it again")
        self._serial += 1
        return self._serial, self._outbox

    async def _call(self, method: str, *arguments: Any) -> Any:
        serial, outbox = self._next()
        outbox.put("call", serial, method, arguments)
        return await self._expect(serial)

    async def _expect(self, serial: int) -> Any:
        future = self._futures[serial] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._futures.pop(serial, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (messages := await receive(reader)) is not None:
            for serial, name, value in messages:
                future = self._futures.get(serial)
                if future is None or future.done():
                    continue
                if name is None:
                    future.set_result(value)
                else:
                    future.set_exception(restore(name, value))
        process = self._process
        if process is not None:
            await asyncio.to_thread(process.join, _GRACE_S)  # its end of the socket is closed: it is as good as gone
            self._die(f"its process {process.pid} ended with exit code {process.exitcode}")

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineError(f"engine process: request lost: {self._dead}"))


_READY = 0
"""The serial under which the child says that its engine serves."""


class _SentMedia:
    """Which features the child holds, least recently used first; those of running requests stay."""

    def __init__(self, media: MediaStore, max_bytes: int) -> None:
        self.media, self.max_bytes = media, max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self._total = 0

    def forget(self) -> None:
        """A new child holds nothing."""
        self._sizes.clear()
        self._uses.clear()
        self._total = 0

    def use(self, keys: list[str]) -> list[Message]:
        """A request needs these: the messages that bring what the child lacks."""
        missing = {key: self.media.get(key) for key in keys if key not in self._sizes}
        for key, features in missing.items():
            self._sizes[key] = sum(array.nbytes for array in features.values())
            self._total += self._sizes[key]
        for key in keys:
            self._sizes.move_to_end(key)
            self._uses[key] += 1
        return [("put", key, features) for key, features in missing.items()]

    def done(self, keys: list[str]) -> list[Message]:
        """That request has ended: the messages that drop what is too much now."""
        self._uses.subtract(keys)
        dropped: list[Message] = []
        for key in list(self._sizes):
            if self._total <= self.max_bytes:
                break
            if self._uses[key] <= 0:
                self._total -= self._sizes.pop(key)
                del self._uses[key]
                dropped.append(("drop", key))
        return dropped


# --- the child --------------------------------------------------------------------------------------------------------


def _main(connection: socket.socket, builder: Builder) -> None:
    """The child process. Ctrl-C goes to the whole terminal: the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_child(connection, builder))


async def _child(connection: socket.socket, builder: Builder) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    outbox = Outbox(writer)
    try:
        engine, media = builder()
        await engine.start()
    except Exception as error:
        outbox.put(_READY, *describe(error))
        outbox.flush()
        await writer.drain()
        return
    outbox.put(_READY, None, engine.exact_versions)
    served = _Served(engine, media, outbox)
    try:
        while (messages := await receive(reader)) is not None:
            for message in messages:
                if message[0] == "stop":
                    return
                getattr(served, message[0])(*message[1:])
    finally:
        await engine.stop()


class _Served:
    """The child's side of each kind of message, by its name."""

    def __init__(self, engine: Engine, media: MediaStore, outbox: Outbox) -> None:
        self.engine, self.media, self.outbox = engine, media, outbox
        self.enter, self.leave = engine.enter, engine.leave
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def put(self, key: str, features: dict[str, Any]) -> None:
        self.media.put(key, features)
        self.media.retain([key])

    def drop(self, key: str) -> None:
        self.media.release([key])

    def generate(self, serial: int, request: Request) -> None:
        self.call(serial, "generate", (request,))

    def cancel(self, serial: int) -> None:
        if task := self._tasks.get(serial):
            task.cancel()

    def call(self, serial: int, method: str, arguments: tuple[Any, ...]) -> None:
        task = asyncio.create_task(self._answer(serial, method, arguments))
        self._tasks[serial] = task
        task.add_done_callback(lambda _: self._tasks.pop(serial, None))

    async def _answer(self, serial: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = await getattr(self.engine, method)(*arguments)
        except Exception as error:
            self.outbox.put(serial, *describe(error))
        else:
            self.outbox.put(serial, None, value)
