"""Messages between a client and an engine elsewhere, collected for each turn of the sender's event loop; errors too."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any

from relax_core import errors
from relax_core.errors import EngineError, RelaxError

_HEADER = struct.Struct("<Q")

Message = tuple[Any, ...]
"""To the engine: the kind and what belongs to it. From it: the serial, and (None, value) or an error's (name, text)."""

Send = Callable[[list[Message]], None]
"""Passes messages on, in order; must not wait."""


class Outbox:
    """Collects messages and sends them together when the event loop comes round; keeps their order."""

    def __init__(self, send: Send) -> None:
        self._send, self._messages = send, list[Message]()

    def put(self, *message: Any) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.flush)
        self._messages.append(message)

    def flush(self) -> None:
        messages, self._messages = self._messages, []
        if messages:
            self._send(messages)


def framed(writer: asyncio.StreamWriter) -> Send:
    """Sends each list of messages as one pickled frame."""

    def send(messages: list[Message]) -> None:
        if not writer.is_closing():
            data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
            writer.write(_HEADER.pack(len(data)))
            writer.write(data)

    return send


def answering(writer: asyncio.StreamWriter) -> Send:
    """As ``framed``, for answers: one that cannot be pickled travels as an error, and the others as they are."""
    send = framed(writer)

    def each(messages: list[Message]) -> None:
        for serial, name, value in messages:
            try:
                send([(serial, name, value)])
            except Exception as error:
                send([(serial, *describe(EngineError(f"an answer of the engine cannot travel: {_line(error)}")))])

    def together(messages: list[Message]) -> None:
        try:
            send(messages)
        except Exception:
            each(messages)

    return together


async def receive(reader: asyncio.StreamReader) -> list[Message] | None:
    """The messages of the next frame; None when the other side is gone. Raises what unpickling raises."""
    try:
        (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        messages: list[Message] = pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return messages


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def describe(error: BaseException) -> tuple[str, str]:
    """An error as it travels: its type's name and its text."""
    return type(error).__name__, str(error)


def restore(name: str, text: str, where: str = "engine process") -> RelaxError:
    """The error that the other side described; one that is not Relax's own becomes an EngineError."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RelaxError):
        return kind(text)
    return EngineError(f"{where}: {name}: {text}")
