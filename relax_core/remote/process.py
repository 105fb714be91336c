"""An engine in a process of its own, behind the same interface: the caller's event loop never waits for a decode step.

The child rebuilds its engine by a picklable builder. Requests, completions and weight *handles* cross a socket pair;
media features cross once for each key. The end of one side is an end of file for the other, so neither is left behind.
Other processes may be guests of the same engine: they connect to a socket that only this user can open.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import signal
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.errors import EngineError
from relax_core.remote.client import READY, RemoteEngine
from relax_core.remote.host import Builder, Host, Served
from relax_core.remote.sent import SentMedia
from relax_core.remote.wire import Outbox, answering, describe, framed, receive

if TYPE_CHECKING:
    from relax_core.media import MediaStore

_GRACE_S = 3.0
"""How long ``stop`` waits for the child to end by itself, and then after SIGTERM."""

_RETRY_S = 0.1
"""Between two attempts of a guest to connect."""


class ProcessEngine(RemoteEngine):
    """Forwards everything to the engine that ``builder`` makes in a child process; starts a new one when that died.

    ``media_bytes`` bounds the features that the child keeps for requests to come. With ``guests``, other processes
    may use the engine too, by ``GuestEngine(address, …)``.
    """

    where = "engine process"

    def __init__(
        self, builder: Builder, media: MediaStore, media_bytes: int = 1_000_000_000, guests: bool = False
    ) -> None:
        super().__init__(SentMedia(media, media_bytes))
        self._builder, self._guests = builder, guests
        self._folder: Path | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return self._process.pid if self._process else None

    @property
    def address(self) -> str | None:
        """Where guests connect; the same after a restart, until ``stop``."""
        return str(self._folder / "engine") if self._folder else None

    async def start(self) -> None:
        """Start the child and wait until its engine serves. Raises what its builder or start raised."""
        await self._end()
        if self._guests and self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="relax-"))
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        arguments = (theirs, self._builder, self.address)
        process = context.Process(target=_main, args=arguments, name="relax-engine", daemon=True)
        process.start()
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._process = process
        self._open(framed(self._writer))
        self._reading = asyncio.create_task(self._read(reader), name="engine process")
        try:
            await self._begin()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the child, by force if it does not listen. Whatever still waits gets an EngineError."""
        await self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _end(self) -> None:
        process, outbox = self._process, self._outbox
        if process is None:
            return
        self._say([("stop",)])
        if outbox is not None:
            outbox.flush()
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
        self._process = self._reading = self._writer = None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        await self._listen(reader)
        process = self._process
        if process is not None:
            await asyncio.to_thread(process.join, _GRACE_S)  # its end of the socket is closed: it is as good as gone
            self._die(f"its process {process.pid} ended with exit code {process.exitcode}")


class GuestEngine(RemoteEngine):
    """An engine process that another process started with ``guests``, at its ``address``. Its owner restarts it.

    ``start`` connects, also again after the engine died; it waits up to ``patience_s`` seconds for the owner's restart.
    Requests wait until the owner has loaded weights.
    """

    where = "guest of an engine process"

    def __init__(
        self, address: str, media: MediaStore, media_bytes: int = 1_000_000_000, patience_s: float = 600.0
    ) -> None:
        super().__init__(SentMedia(media, media_bytes))
        self.address, self.patience_s = address, patience_s
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.stop()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.patience_s
        while not await self._connected():
            if clock() > deadline:
                raise EngineError(f"{self.where}: nobody listens at {self.address} after {self.patience_s:g} s")
            await asyncio.sleep(_RETRY_S)

    async def _connected(self) -> bool:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self.address)
        except OSError:
            return False
        self._open(framed(self._writer))
        self._reading = asyncio.create_task(self._read(reader), name="guest of an engine process")
        try:
            await self._begin()
        except EngineError:  # it ended meanwhile
            await self.stop()
            return False
        return True

    async def stop(self) -> None:
        """Disconnect: the engine forgets this guest, and serves on."""
        self._die("it was disconnected")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        self._reading = self._writer = None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        await self._listen(reader)
        self._die("its process ended")


# --- the child --------------------------------------------------------------------------------------------------------


def _main(connection: socket.socket, builder: Builder, address: str | None) -> None:
    """The child process. Ctrl-C goes to the whole terminal: the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_child(connection, builder, address))


async def _child(connection: socket.socket, builder: Builder, address: str | None) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    outbox = Outbox(answering(writer))
    try:
        engine, media = builder()
        await engine.start()
    except Exception as error:
        outbox.put(READY, *describe(error))
        outbox.flush()
        await writer.drain()
        return
    host = Host(engine, media)
    try:
        if address is not None:
            await _invite(host, address)
        outbox.put(READY, None, engine.exact_versions)
        orphaned = await _serve_owner(Served(host, outbox.put), reader)
    finally:
        await engine.stop()
    if orphaned and address is not None:  # a killed owner leaves this to its child
        shutil.rmtree(Path(address).parent, ignore_errors=True)


async def _serve_owner(served: Served, reader: asyncio.StreamReader) -> bool:
    """Until it says stop, or is gone: then True."""
    while (messages := await receive(reader)) is not None:
        if messages[-1] == ("stop",):
            return False
        served.apply(messages)
    return True


async def _invite(host: Host, address: str) -> None:
    """Serve every process that connects to this address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outbox = Outbox(answering(writer))
        outbox.put(READY, None, host.engine.exact_versions)
        served = Served(host, outbox.put, guest=True)
        try:
            while (messages := await receive(reader)) is not None:
                served.apply(messages)
        finally:
            served.close()
            writer.close()

    with suppress(FileNotFoundError):
        Path(address).unlink()  # of a child that was killed
    await asyncio.start_unix_server(serve, address)
