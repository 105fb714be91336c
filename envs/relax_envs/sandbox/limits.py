"""What a program in the sandbox may use, and how its run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_core.errors import RelaxError

How = Literal["ended", "failed", "timeout", "memory", "flood", "killed"]
"""``failed``: with an exception or an exit code; ``flood``: more output, files or threads than allowed; ``killed``: by
a signal, or since nobody waits for it any more."""

END = "end"
"""What a judge says when it has said all."""


class SandboxError(RelaxError):
    """The sandbox itself did not work: the program had not begun."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    seconds: float = 6.0
    """By the clock, from when the program begins, or for each test of a judge; without one also of computing, rounded
    up, Python's start included."""
    whole_seconds: float | None = None
    """Of a run with a judge, all its tests together; also of computing of each process. None: ``seconds``."""
    memory_bytes: int = 1 << 30
    """Of address space, Python itself included."""
    output_bytes: int = 1 << 20
    """Of standard output, and as much of standard error."""
    file_bytes: int = 16 << 20
    """Of each file that it writes in its folder."""
    folder_bytes: int = 128 << 20
    """Of all files in its folder; looked at ten times a second."""
    entries: int = 500
    """Files and folders in its folder; likewise."""
    threads: int = 200
    """At the same time; likewise."""
    files: int = 64
    """Open at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``code``: the exit code, negative for a signal. ``verdicts``: what a judge said: of each test
    how it came out, or the exit code of a program that was gone (None: it only fell mute); END when that is all.

    ``seconds``: since the program began. ``guards``: the layers that were up.
    """

    how: How
    code: int
    stdout: bytes
    stderr: bytes
    verdicts: tuple[str | int | None, ...]
    seconds: float
    guards: tuple[str, ...] = field(default=())
