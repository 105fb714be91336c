"""Messages between a process and its engine process: pickled, one frame for each turn of the sender's event loop."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

from relax_core import errors
from relax_core.errors import EngineError, RelaxError

_HEADER = struct.Struct("<Q")

Message = tuple[Any, ...]
"""The kind, and what belongs to it."""


class Outbox:
    """Collects messages and writes them together when the event loop comes round; keeps their order."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._messages = writer, list[Message]()

    def put(self, *message: Any) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.flush)
        self._messages.append(message)

    def flush(self) -> None:
        messages, self._messages = self._messages, []
        if messages and not self._writer.is_closing():
            data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(_HEADER.pack(len(data)))
            self._writer.write(data)


async def receive(reader: asyncio.StreamReader) -> list[Message] | None:
    """The messages of the next frame; None when the other side is gone."""
    try:
        (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        messages: list[Message] = pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
    return messages


def describe(error: BaseException) -> tuple[str, str]:
    """An error as it travels: its type's name and its text."""
    return type(error).__name__, str(error)


def restore(name: str, text: str) -> RelaxError:
    """The error that the other side described; one that is not Relax's own becomes an EngineError."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RelaxError):
        return kind(text)
    return EngineError(f"engine process: {name}: {text}")
