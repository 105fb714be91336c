"""Runs an agent's command under a guard, and ends all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.guard import guarded

_CHUNK = 1 << 16
_GRACE_S = 5.0
"""How long the guard may take to kill everybody; it is far quicker."""


@dataclass(frozen=True, slots=True)
class Ended:
    """``code``: the exit code, 128 + the signal, or None for a command that was still running at its deadline.
    ``said``: the end of its standard error."""

    code: int | None
    said: str


async def run(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], deadline_s: float, most_said: int) -> Ended:
    """Run a command to its end, or to the deadline. When this returns or raises, nothing that it started is left.

    ``most_said``: characters of its standard error that are kept. What it writes to standard output is not. Raises
    OSError when it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *guarded([*command]), stdin=PIPE, stdout=DEVNULL, stderr=PIPE, cwd=cwd, env=dict(env), start_new_session=True
    )
    tail = _Tail(most_said)
    reading = asyncio.create_task(tail.read(process))
    late = False
    try:
        await asyncio.wait_for(process.wait(), deadline_s)
    except TimeoutError:
        late = True
    finally:
        ending = asyncio.create_task(_end(process, reading))
        await asyncio.shield(ending)
    return Ended(None if late else process.returncode, tail.text)


async def _end(process: Process, reading: asyncio.Task[None]) -> None:
    """The end of its standard input makes the guard kill all, and end."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reading, _GRACE_S)


class _Tail:
    """The last characters of what a process says on standard error."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, b""

    async def read(self, process: Process) -> None:
        assert process.stderr is not None
        while piece := await process.stderr.read(_CHUNK):
            self._bytes = (self._bytes + piece)[-4 * self._most :]  # a character has at most four bytes

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")[-self._most :].strip() if self._most else ""
