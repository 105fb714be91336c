"""HTTP/1.1 over plain streams: a rollout has hundreds of requests with the server at once, and each must cost little.

General clients look through all of their connections at each request: with 256 of them that takes as long as a server
on a GPU takes for the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit

_KEPT_S = 2.0
"""How long an unused connection is kept: less than the server's own 5 s, which may close it just as we use it."""
_CONNECT_S = 10.0
_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Broken(Exception):
    """No whole answer came."""


@dataclass(slots=True)
class Connections:
    """To the server at ``url``; belongs to one event loop. ``headers`` go with every request."""

    url: str
    headers: dict[str, str]
    _idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    _busy: set[asyncio.StreamWriter] = field(default_factory=set)
    _closed: bool = False

    async def ask(self, method: str, path: str, content: bytes | None, seconds: float | None) -> Response:
        """Raises Broken, and TimeoutError when no whole answer came within ``seconds``."""
        request = self._head(method, path, content) + (content or b"")
        try:
            async with asyncio.timeout(seconds):
                if (kept := self._kept()) is not None:
                    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                        return await self._exchange(*kept, request)
                    # The server closed it just as we used it.
                return await self._exchange(*await self._connected(), request)
        except TimeoutError:
            raise
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Broken(f"{type(error).__name__} {error}".rstrip()) from error

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Response:
        if self._closed:
            _close(writer)
            raise EOFError("we have closed our connections")
        self._busy.add(writer)
        try:
            writer.write(request)
            response, again = await _response(reader)
        except BaseException:
            _close(writer)  # an answer may still come
            raise
        finally:
            self._busy.discard(writer)
        if again:
            self._idle.append((monotonic(), reader, writer))
        else:
            _close(writer)
        return response

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The connection that was used last: the others grow old, and go."""
        now = monotonic()
        while self._idle and (now - self._idle[0][0] > _KEPT_S):
            _close(self._idle.pop(0)[2])
        while self._idle:
            _, reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            _close(writer)
        return None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=_LINE)

    def _head(self, method: str, path: str, content: bytes | None) -> bytes:
        parts = urlsplit(self.url)
        lines = [f"{method} {parts.path}{path} HTTP/1.1", f"host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if content is not None:
            lines.append(f"content-length: {len(content)}")
        return "\r\n".join([*lines, "", ""]).encode()

    def close(self) -> None:
        """Whoever waits for an answer gets Broken."""
        self._closed = True
        while self._idle:
            _close(self._idle.pop()[2])
        for writer in self._busy:
            writer.transport.abort()


async def _response(reader: asyncio.StreamReader) -> tuple[Response, bool]:
    """An answer, and whether the connection can be used again. Raises EOFError and ValueError."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    again = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b"".join([piece async for piece in _chunks(reader)])
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif status == "204":
        body = b""
    else:
        body, again = await reader.read(), False
    return Response(int(status), body), again


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass


def _close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        writer.close()
