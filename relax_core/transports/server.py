"""A small TCP server in a publisher's thread: reads of published buffers, and members that come and go.

A connection begins with the server's token. Then the client asks: to read bytes of a publication, or to be a member for
as long as the connection is open.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from typing import TYPE_CHECKING, cast

from relax_core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

BIG = 8 << 20
"""Bytes that are asked for at once where several connections share the work, and of a device's memory."""
_ASK = struct.Struct("<BQQQ")
_ANSWER = struct.Struct("<q")
_READ, _JOIN = 1, 2
_SILENT_S = 30.0
"""How long a receiver may accept no byte, and a publisher send none."""


class Server:
    """Offers buffers (uint8) under numbers. Listens on one address and a free port of it."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_bytes(32)
        self.sent = 0
        self._offered: dict[int, Tensor] = {}
        self._numbers = self._joined = 0
        self._members: set[int] = set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise WeightsError(
                f"transport.host: {host!r} cannot be listened on ({error}); use this machine's"
            ) from error
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="weights server", daemon=True).start()

    def offer(self, buffer: Tensor) -> int:
        with self._lock:
            self._numbers += 1
            self._offered[self._numbers] = buffer
            return self._numbers

    def withdraw(self, number: int) -> None:
        with self._lock:
            self._offered.pop(number, None)

    @property
    def members(self) -> list[int]:
        """Those whose connection is open, in the order in which they came."""
        with self._lock:
            return sorted(self._members)

    def close(self) -> None:
        with self._lock:
            ends = [self._listener, *self._open]
            self._offered.clear()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="weights reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        member = None
        with self._lock:
            self._open.add(connection)
        try:
            connection.settimeout(_SILENT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token = bytearray(32)
            _read(connection, memoryview(token))
            if not hmac.compare_digest(token, self.token):
                return
            connection.settimeout(None)  # it may be silent between two publications
            asked = bytearray(_ASK.size)
            while True:
                _read(connection, memoryview(asked))
                kind, number, start, stop = _ASK.unpack(asked)
                if kind == _JOIN:
                    with self._lock:
                        self._joined += 1
                        member = member or self._joined
                        self._members.add(member)
                    connection.sendall(_ANSWER.pack(member))
                elif kind == _READ:
                    self._send(connection, number, start, stop)
        except (OSError, EOFError):
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
                self._members.discard(member or 0)
            connection.close()

    def _send(self, connection: socket.socket, number: int, start: int, stop: int) -> None:
        with self._lock:
            buffer = self._offered.get(number)
        connection.sendall(_ANSWER.pack(-1 if buffer is None else buffer.numel()))
        if buffer is None or not start <= stop <= buffer.numel():
            return
        connection.settimeout(_SILENT_S)
        for at in range(start, stop, BIG):
            piece = buffer[at : min(at + BIG, stop)].cpu()
            with self._lock:  # before they leave: who has them all finds them all counted
                self.sent += piece.numel()
            connection.sendall(memoryview(cast(bytes, piece.numpy())))
        connection.settimeout(None)


class Connection:
    """A client's end."""

    def __init__(self, end: socket.socket, token: bytes) -> None:
        self._end = end
        end.settimeout(_SILENT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(token)

    def ask(self, number: int, start: int, stop: int) -> None:
        """For bytes, which ``read`` then gives. Raises WeightsError when they are not there."""
        size = self._answer(_ASK.pack(_READ, number, start, stop))
        if size < 0:
            raise WeightsError(
                "weights: the publisher does not hold this publication any more: two later ones have replaced it; "
                "take the newest"
            )
        if stop > size:
            raise WeightsError(
                f"weights: the buffer has {size} bytes, its manifest says {stop}; publish the weights again"
            )

    def join(self) -> int:
        """Become a member until ``close``; the number under which the publisher knows this one."""
        return self._answer(_ASK.pack(_JOIN, 0, 0, 0))

    def _answer(self, question: bytes) -> int:
        self._end.sendall(question)
        answer = bytearray(_ANSWER.size)
        _read(self._end, memoryview(answer))
        return int(_ANSWER.unpack(answer)[0])

    def read(self, memory: memoryview) -> None:
        _read(self._end, memory)

    def close(self) -> None:
        self._end.close()


def _read(connection: socket.socket, memory: memoryview) -> None:
    """Raises EOFError when the other side ends before the memory is full."""
    at = 0
    while at < len(memory):
        count = connection.recv_into(memory[at:])
        if not count:
            raise EOFError("it ended the connection")
        at += count
