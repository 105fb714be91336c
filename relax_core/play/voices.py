"""Who replies in a play by hand: the lines of a script, or a person at the keyboard."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from relax_core.chat import PlayOver
from relax_core.errors import ConfigError, DataError
from relax_core.types import Stop

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter, Request
    from relax_core.scripted import Say


def read_script(path: Path) -> list[str]:
    """A reply for each line; one that begins with ``"`` is JSON text, so that it may hold line breaks.

    Raises ConfigError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replies: {path} cannot be read ({error}): name a text file") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line) if line.startswith('"') else line
        except ValueError as error:
            raise ConfigError(f"--replies: {path}:{number}: not JSON text: {error}") from error
        found.append(str(text))
    return found


def script(replies: Sequence[str], adapter: ModelAdapter, note: Callable[[str], None]) -> Say:
    """Each reply in its turn; then the play is over. Raises DataError for one that the model cannot say."""
    rest = iter([said(text, adapter) for text in replies])

    def say(request: Request) -> Sequence[int]:
        for ids in rest:
            return ids
        note(f"all {len(replies)} replies are said, and the environment asks for another one: the play ends here")
        raise PlayOver(Stop.ABORT)

    return say


def said(text: str, adapter: ModelAdapter) -> list[int]:
    """The ids of a reply. Raises ConfigError for an adapter that cannot make any."""
    try:
        return adapter.reply(text)
    except NotImplementedError as error:
        raise ConfigError(f"--policy: {error}: only --policy model plays with this model") from error


def person(adapter: ModelAdapter, note: Callable[[str], None], stream: TextIO | None = None) -> Say:
    """A line that is typed for each reply. A call of a tool may be typed as JSON; the end of input ends the play."""
    said("", adapter)
    lines = Lines(stream or sys.stdin)

    async def say(request: Request) -> Sequence[int]:
        while True:
            note("reply> ")
            line = await lines.next()
            if line is None:
                note("\n")
                raise PlayOver(Stop.ABORT)
            try:
                return said(as_reply(line), adapter)
            except DataError as error:
                note(f"{error}\n")

    return say


def as_reply(line: str) -> str:
    """What was typed; a JSON object with a ``name``, or a list of them, as calls of tools in the Hermes format."""
    try:
        value: Any = json.loads(line) if line.lstrip()[:1] in ("{", "[") else None
    except ValueError:
        return line
    calls: Iterable[Any] = value if isinstance(value, list) else [value]
    if not value or not all(isinstance(call, dict) and "name" in call for call in calls):
        return line
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


class Lines:
    """Reads lines without blocking the event loop, and without a thread that outlives it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._read, self._ended = b"", False

    async def next(self) -> str | None:
        """The next line without its end; None at the end of input."""
        while b"\n" not in self._read and not self._ended:
            try:
                number = self.stream.fileno()
                await self._readable(number)
            except (OSError, ValueError, NotImplementedError):  # a file, or text in memory: it never blocks
                return self._line(self.stream.readline())
            more = os.read(number, 1 << 16)
            self._read, self._ended = self._read + more, not more
        line, end, self._read = self._read.partition(b"\n")
        return self._line((line + end).decode(errors="replace"))

    async def _readable(self, number: int) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(number)

    def _line(self, line: str) -> str | None:
        return line.rstrip("\r\n") if line else None
