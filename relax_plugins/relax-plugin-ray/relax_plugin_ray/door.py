"""A socket beside an actor's calls: each call of Ray costs both processes more than most of what an engine is told.

A client learns the address by a call. It first says its name, which only it and the actor know; then both send frames
(``relax_core.remote.wire``). No byte is unpickled before the name is found right.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from uuid import uuid4

from relax_plugin_ray.worker import node_address

NAME = 32
"""Characters of a name."""
_GREETING_S = 30.0
"""How long a client may take to connect, and to say its name."""
_SILENT_S, _PROBE_S = 15, 5
"""After so many seconds without a byte the other machine is asked whether it lives, then every so many seconds."""
_LOST_S = 30
"""A machine that confirms nothing for so long is gone."""
_BUFFER = 1 << 20

Visit = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves the client of this name as long as it stays; returns at once when nobody has this name."""


class Address(NamedTuple):
    host: str
    port: int


def new_name() -> str:
    """Nobody guesses it."""
    return uuid4().hex


class Door:
    """Of an actor; its clients enter by ``enter``."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self.address: Address | None = None
        """Where clients enter, once it is open."""

    async def open(self) -> None:
        """Listen where the other nodes of the cluster reach this one, on a free port."""
        host = node_address()
        server = await asyncio.start_server(self._greet, host, 0, limit=_BUFFER)
        self.address = Address(host, server.sockets[0].getsockname()[1])

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _notice_lost_machines(writer)
        try:
            async with asyncio.timeout(_GREETING_S):
                name = await reader.readexactly(NAME)
            await self._visit(name.decode("ascii", "replace"), reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # a stranger, or one that left at once
        finally:
            writer.close()


async def enter(address: Address, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError, and TimeoutError, when nobody is there."""
    async with asyncio.timeout(_GREETING_S):
        reader, writer = await asyncio.open_connection(*address, limit=_BUFFER)
    _notice_lost_machines(writer)
    writer.write(name.encode())
    return reader, writer


def _notice_lost_machines(writer: asyncio.StreamWriter) -> None:
    """A process that ends closes its sockets, a machine that is switched off does not."""
    end = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENT_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", (_LOST_S - _SILENT_S) // _PROBE_S),
        ("TCP_USER_TIMEOUT", _LOST_S * 1000),
    ):
        if hasattr(socket, option):  # Linux has them all
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
