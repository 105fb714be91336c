"""An engine that lives in a Ray actor, and its clients in any processes of the cluster.

All that a client says in one turn of its event loop travels together, numbered, and so do the answers to it: through a
socket (``door``). Media features travel as references into the object store where the store can share them; only a call
of Ray can carry these, so what comes with them takes that way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayError

from relax_core.errors import EngineError
from relax_core.remote.client import READY, RemoteEngine
from relax_core.remote.host import Builder, Host, Served, Take
from relax_core.remote.sent import Pack, SentMedia
from relax_core.remote.wire import Message, Outbox, Send, answering, describe, framed, receive
from relax_core.setup import EngineSetup
from relax_plugin_ray.door import Address, Door, enter, new_name
from relax_plugin_ray.media import Shared, SharedMedia
from relax_plugin_ray.worker import adapter_of, imported, keep_to, node_address, run_of

if TYPE_CHECKING:
    from relax_core.interfaces import Engine
    from relax_core.media import MediaStore

Actor = Any
"""A handle of an ``EngineActor``."""

CONCURRENCY = 10_000
"""Calls that an engine actor runs at once; a guest's first one waits there for the owner's."""
_CONNECT_S = 60.0
"""How long a client that was opened may take to connect."""

_GRACE_S = 3.0
"""How long ``stop`` waits for the engine to end by itself."""
_RETRY_S = (0.1, 1.0)
"""Between two attempts of a guest to connect: at first, and at most."""


@dataclass(frozen=True, slots=True)
class RunBuilder:
    """Builds the run file's engine, with a media store that knows what others share (picklable)."""

    resolved: Mapping[str, Any]
    role: str
    deterministic: bool
    cores: tuple[int, ...] = ()

    def __call__(self) -> tuple[Engine, MediaStore]:
        keep_to(self.cores, self.role)
        run = run_of(self.resolved, self.role)
        imported(run, "engines", run.config.engine)
        adapter, media = adapter_of(run)
        setup = EngineSetup(adapter, run.config.seed, self.deterministic, run.directory, self.role)
        return run.stack.build("engines", run.config.engine, setup, where="engine"), media


def engine_actor(builder: Builder, **options: Any) -> Actor:
    """Make an engine actor. ``options`` are Ray's: resources, placement, name. Ray does not restart it: its owner does,
    for it must have weights before it serves."""
    settings = {"max_restarts": 0, "max_concurrency": CONCURRENCY, **options}
    return ray.remote(EngineActor).options(**settings).remote(builder)


class EngineActor:
    """Run it by ``engine_actor``. The owner's ``open`` builds and starts the engine."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._host: Host | None = None
        self._clients: dict[str, _Client] = {}
        self._begun = asyncio.Event()
        self._door = Door(self._visit)

    def __repr__(self) -> str:
        return str(getattr(self._builder, "role", "engine"))

    async def pid(self) -> int:
        return os.getpid()

    async def open(self, name: str, guest: bool) -> tuple[list[Message], Address | None]:
        """Begin to serve a client, which connects then, until its connection ends. Guests wait for the owner.

        Gives what a client is told first, and where to connect, unless that was an error.
        """
        try:
            if guest:
                await self._begun.wait()
            else:
                await self._begin()
        except Exception as error:
            return [(READY, *describe(error))], None
        assert self._host is not None
        self._clients[name] = _Client(self._host, guest)
        asyncio.get_running_loop().call_later(_CONNECT_S, self._miss, name)
        return [(READY, None, self._host.engine.exact_versions)], self._door.address

    async def _begin(self) -> None:
        engine, media = self._builder()
        await engine.start()
        await self._door.open()
        self._host = Host(engine, media, _taker(media), _address)
        self._begun.set()

    def _miss(self, name: str) -> None:
        """It has ended before it could connect."""
        if (client := self._clients.get(name)) and not client.connected.is_set():
            self._close(name)

    async def _visit(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._clients.get(name)
        if client is None or client.connected.is_set():
            return
        client.connect(answering(writer))
        try:
            while (frame := await receive(reader)) is not None:
                for number, messages in frame:
                    client.receive(number, messages)
        finally:
            self._close(name)

    async def send(self, name: str, number: int, messages: list[Message]) -> None:
        """Messages of a client, the ``number``-th that it sends, with references; others may overtake them."""
        if client := self._clients.get(name):
            await client.connected.wait()
            if name in self._clients:
                client.receive(number, messages)

    async def close(self, name: str) -> None:
        self._close(name)

    def _close(self, name: str) -> None:
        if client := self._clients.pop(name, None):
            client.close()

    async def stop(self) -> None:
        for name in list(self._clients):
            self._close(name)
        if self._host is not None:
            await self._host.engine.stop()


class _Client:
    """A client at the actor: what it sends put in order, and the way back."""

    def __init__(self, host: Host, guest: bool) -> None:
        self._served = Served(host, self._answer, guest)
        self._early: dict[int, list[Message]] = {}
        self._next = 1
        self._outbox: Outbox | None = None
        self.connected = asyncio.Event()

    def connect(self, send: Send) -> None:
        self._outbox = Outbox(send)
        self.connected.set()

    def receive(self, number: int, messages: list[Message]) -> None:
        self._early[number] = messages
        while (due := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._served.apply(due)

    def close(self) -> None:
        self._served.close()
        self.connected.set()

    def _answer(self, *answer: Any) -> None:
        assert self._outbox is not None, "nothing is received before the client is connected"
        self._outbox.put(*answer)


def _address() -> str | None:
    """Of this machine, if the cluster has others: peers cannot map the memory of this one there."""
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    others = sum(bool(node["Alive"]) for node in nodes()) > 1
    return node_address() if others else None


def _taker(media: MediaStore) -> Take:
    """How the store takes what ``_packer`` packed."""

    def take(key: str, parcel: Any) -> None:
        if isinstance(parcel, dict):
            media.put(key, parcel)
        elif isinstance(media, SharedMedia):
            media.know({key: parcel})
        else:
            media.put(key, parcel.features())

    return take


def _packer(media: MediaStore) -> Pack | None:
    """References to features instead of features."""
    if not isinstance(media, SharedMedia):
        return None

    def pack(keys: list[str]) -> Mapping[str, Any]:
        shared = media.share(keys)
        for key in keys:
            if key not in shared:
                media.get(key)  # says what is wrong
        return shared

    return pack


class RayEngine(RemoteEngine):
    """A client of an engine actor: the owner (``spawn``), who makes it anew when it died, or a guest (``connect``)."""

    where = "engine actor"

    def __init__(
        self, find: Callable[[], Actor], media: MediaStore, media_bytes: int, guest: bool, patience_s: float
    ) -> None:
        super().__init__(SentMedia(media, media_bytes, _packer(media)))
        self._find, self._guest, self._patience_s = find, guest, patience_s
        self.handle: Actor | None = None
        self._name = ""
        self._number = 0
        self._starting = False
        self._write: Send | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Future[None]] = set()

    @classmethod
    def spawn(cls, create: Callable[[], Actor], media: MediaStore, media_bytes: int = 1_000_000_000) -> Self:
        """The owner. ``create`` makes the actor, at every start (see ``engine_actor``)."""
        return cls(create, media, media_bytes, guest=False, patience_s=0.0)

    @classmethod
    def connect(
        cls,
        actor: Actor | Callable[[], Actor],
        media: MediaStore,
        media_bytes: int = 1_000_000_000,
        patience_s: float = 600.0,
    ) -> Self:
        """A guest of an actor, or of the one that a function finds at every start (ValueError: it is not there yet).

        ``start`` waits up to ``patience_s`` seconds for an actor that lives. Requests wait until the owner has loaded
        weights.
        """
        find: Callable[[], Actor] = actor if callable(actor) else lambda: actor
        return cls(find, media, media_bytes, guest=True, patience_s=patience_s)

    async def reconnect(self, actor: Actor) -> None:
        """A guest's owner has made this actor in the place of the one that died."""
        self._find = lambda: actor
        if not self._starting:  # else that start finds it
            await self.start()

    async def start(self) -> None:
        """Raises what the engine's builder or start raised."""
        self._starting = True
        try:
            await self._end()
            if self._guest:
                await self._visit()
            else:
                await self._join(self._find())
        except BaseException:
            await self._end()
            raise
        finally:
            self._starting = False

    async def _visit(self) -> None:
        """Connect to the newest actor as soon as there is one that lives."""
        clock = asyncio.get_running_loop().time
        deadline, pause = clock() + self._patience_s, _RETRY_S[0]
        while True:
            try:
                return await self._join(self._find())
            except (ValueError, EngineError) as error:
                if clock() > deadline:
                    raise EngineError(
                        f"{self.where}: no actor to connect to after {self._patience_s:g} s: {error}"
                    ) from error
            await self._end()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_S[1])

    async def _join(self, handle: Actor) -> None:
        self.handle, self._name, self._number = handle, new_name(), 0
        self._open(self._send)
        self._reading = asyncio.create_task(self._read(handle, self._name), name="engine actor")
        await self._begin()

    async def stop(self) -> None:
        """The owner ends the actor; a guest leaves it. Whatever still waits gets an EngineError."""
        await self._end()

    async def _end(self) -> None:
        handle, self.handle, lived = self.handle, None, self._dead is None
        self._die("it was disconnected" if self._guest else "it was stopped")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        if handle is None:
            return
        if lived:
            farewell = handle.close.remote(self._name) if self._guest else handle.stop.remote()
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(farewell, _GRACE_S)
        if not self._guest:
            ray.kill(handle)

    def _send(self, messages: list[Message]) -> None:
        assert self.handle is not None and self._write is not None
        self._number += 1
        if not _refer(messages):
            self._write([(self._number, messages)])
            return
        call = self.handle.send.remote(self._name, self._number, messages)
        sending = asyncio.ensure_future(self._sent_off(call, self._name))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _sent_off(self, call: Any, name: str) -> None:
        try:
            await call
        except RayError as error:
            if name == self._name:
                self._die(_line(error))

    async def _read(self, handle: Actor, name: str) -> None:
        try:
            answers, address = await handle.open.remote(name, self._guest)
            if address is None:
                self._deliver(answers)
                return
            reader, writer = await enter(address, name)
            self._write = framed(writer)
            try:
                self._deliver(answers)
                await self._listen(reader)
            finally:
                writer.close()
            self._die(await _why(handle))
        except (RayError, OSError) as error:  # a TimeoutError, too
            self._die(_line(error))


async def _why(handle: Actor) -> str:
    """Why its connection has ended: Ray knows whether the actor has. Raises RayError if so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            await handle.pid.remote()
            return "it serves this client no more"
    return "the connection broke, and it does not answer"


def _refer(messages: Iterable[Message]) -> bool:
    """Whether references into the object store are among them: these travel by Ray alone, which counts them."""
    return any(kind == "put" and isinstance(about[1], Shared) for kind, *about in messages)


def _line(error: Exception) -> str:
    """The gist of one of Ray's errors, which have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:", "ip:"))]
    return f"{type(error).__name__}: {' '.join(said)[:300]}"
