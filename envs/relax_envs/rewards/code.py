"""Reward ``code``: whether the reply's program passes the task's tests, run in a sandbox."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.loops import PerLoop
from relax_envs.rewards.reply import final_part
from relax_envs.sandbox.limits import END, Limits
from relax_envs.sandbox.runner import refuse_unsafe, run
from relax_envs.sandbox.task_tests import StandardIO, Test, read_tests
from relax_envs.sandbox.watch import how_it_ended
from relax_envs.threads import stoppable

_OPEN = re.compile(r"([ \t]*)(?:(?:[-*+>]|\d+[.)])[ \t]+)*(`{3,}|~{3,})[ \t]*\{?\.?([\w+#-]*)[^`]*")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*")
NAMES = ("entry_point", "fn_name", "func_name")
"""Metadata that name the function of tests which do not name it."""


class Code(Reward):
    """1.0 if the program in the reply passes every test, else 0.0; with ``partial`` the share that it passes.

    - The program is, after the reasoning, the last fenced block that says python (or py); else the last one that names
      no language, else the last one. A reply without a complete block has none: 0. ``fenced: false`` takes the whole
      reply then.
    - Tests are the task's answer, or a column of its metadata: ``relax_envs.sandbox.task_tests`` lists their forms.
      Outputs are compared line by line, white space at the ends of lines and of the text left out. For tests of
      functions the program runs as a module: ``__name__`` is not ``__main__``.
    - What the program does wrong is its fault and 0: an exception, a wrong result, too much time, memory or output,
      what it may not do. So a policy cannot escape a 0 by hanging its grader.
    - A sandbox that does not work, and tests that cannot be read, are errors that are counted; the play abstains.
    - Among the trajectory's metrics are ``code/passed``, the share of tests (without ``partial`` no run follows one in
      which a test failed, and what was not run has not passed), and, where one failed, ``code/<how>`` of the first:
      wrong, failed, timeout, memory, flood, killed; or missing, too_long: of the program.

    Tests that are Python run in a process of their own, the judge, which has only values and handles of what is in the
    program's: a program passes by answering with values that the tests take for right, and cannot replace what they
    compare with. Weak tests stay weak, and objects of a program's own classes equal only themselves.

    Abstains where the play failed. docs/sandbox.md says what programs and tests can and cannot do, and on which
    systems.
    """

    class Config(ComponentConfig):
        tests: str = "answer"
        """``answer``, or the name of the task's metadata that hold the tests."""
        fenced: bool = True
        """Whether the program must stand in a fenced block."""
        partial: bool = False
        """Whether a part of the tests counts."""
        most_tests: PositiveInt = 50
        """Only so many tests are run, the first of the task."""
        seconds: Annotated[float, Field(gt=0)] = 6.0
        """For each test, by the clock; the program's beginning counts to the first."""
        total_seconds: Annotated[float, Field(gt=0)] = 15.0
        """For all tests of a reply's program; those that were not run by then are failed. The section's ``timeout``
        counts waiting, too: it should be at least this times group_size / ``concurrency``, or replies at the end of
        the queue abstain where others before them take all their time."""
        memory_mb: Annotated[int, Field(ge=64)] = 1024
        """Address space of each process, Python included."""
        concurrency: PositiveInt = 2
        """Programs that run at the same time."""
        longest: PositiveInt = 100_000
        """Characters of a program; a longer one is wrong."""
        allow_unsafe: bool = False
        """Run programs also where this system cannot keep them off the network, the files and the processes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.allow_unsafe:
            refuse_unsafe("reward code", "grade elsewhere by the reward remote")
        self._limits = Limits(seconds=config.seconds, memory_bytes=config.memory_mb << 20)
        self._places: PerLoop[asyncio.Semaphore] = PerLoop(lambda: asyncio.Semaphore(config.concurrency))

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.error is not None:
            return None
        tests = self._tests(trajectory)
        program = program_of(trajectory.last_reply, self.config.fenced)
        if program is None or len(program) > self.config.longest:
            found = ["missing" if program is None else "too_long"]
        else:
            places = self._places.get()
            await places.acquire()
            found = await stoppable(partial(self._judge, program, tests), "reward code", places.release)
        passed = sum(how == "passed" for how in found) / len(tests)
        trajectory.metrics["code/passed"] = passed
        if failed := next((how for how in found if how != "passed"), None):
            trajectory.metrics[f"code/{failed}"] = 1.0
        return passed if self.config.partial else float(passed == 1.0)

    def _tests(self, trajectory: Trajectory) -> list[Test]:
        task, column = trajectory.task, self.config.tests
        given = task.answer if column == "answer" else task.metadata.get(column)
        names = (task.metadata.get(name) for name in NAMES)
        function = next((name for name in names if isinstance(name, str) and name), None)
        try:
            return read_tests(given, function)[: self.config.most_tests]
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"task {task.id!r}: {column}: {error}: fix the row") from error

    def _judge(self, program: str, tests: Sequence[Test], stop: threading.Event) -> list[str]:
        """How each test came out: ``passed``, ``wrong`` or how the program ended; stops early unless parts count."""
        end = time.monotonic() + self.config.total_seconds
        found: list[str] = []
        while len(found) < len(tests) and (self.config.partial or set(found) <= {"passed"}):
            left = end - time.monotonic()
            if left <= 0 or stop.is_set():
                found += ["timeout"] * (len(tests) - len(found))
            else:
                limits = replace(self._limits, seconds=min(self._limits.seconds, left), whole_seconds=left)
                found += _tried(program, tests[len(found) :], limits, stop)
        return found


def program_of(reply: str, fenced: bool = True) -> str | None:
    """The program in a reply, after its reasoning; None where it has no complete fenced block."""
    text = final_part(reply)
    found = list(_blocks(text))
    python = [body for language, body in found if _PYTHON.fullmatch(language)]
    bare = [body for language, body in found if not language]
    for bodies in (python, bare, [body for _, body in found]):
        if bodies:
            return bodies[-1]
    return None if fenced else text


def _blocks(text: str) -> Iterable[tuple[str, str]]:
    """Language and content of the fenced blocks, without the indentation of the fence."""
    opened: re.Match[str] | None = None
    body: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if opened is None:
            opened, body = _OPEN.fullmatch(line), []
        elif len(bare := line.strip()) >= len(opened[2]) and set(bare) == {opened[2][0]}:
            yield opened[3].lower(), _outdented(body)
            opened = None
        else:
            body.append(line)


def _outdented(lines: Sequence[str]) -> str:
    """Text without the indentation that all lines have: that of a fence in a list."""
    filled = [line for line in lines if line.strip()]
    shared = min((len(line) - len(line.lstrip(" \t")) for line in filled), default=0)
    return "".join(f"{line[shared:] if line.strip() else ''}\n" for line in lines)


def _tried(program: str, tests: Sequence[Test], limits: Limits, stop: threading.Event) -> list[str]:
    """The verdicts of one run on the first tests: on an input, or on all others up to one that the program did not
    survive."""
    first = tests[0]
    if isinstance(first, StandardIO):
        limits = replace(limits, output_bytes=limits.output_bytes + 8 * len(first.stdout), whole_seconds=None)
        outcome = run(program, stdin=first.stdin.encode(errors="replace"), limits=limits, stop=stop)
        same = _lines(outcome.stdout.decode(errors="replace")) == _lines(first.stdout)
        return [outcome.how if outcome.how != "ended" else "passed" if same else "wrong"]
    judged = []
    for test in tests:
        if isinstance(test, StandardIO):
            break
        judged.append(test.for_judge())
    outcome = run(program, tests=judged, limits=limits, stop=stop)
    *said, last = outcome.verdicts or (None,)
    if last != END:  # the judge itself came to an end, by what it was given or for want of time
        return [*map(str, outcome.verdicts), outcome.how if outcome.how != "ended" else "failed"]
    return [_how_lost(one, outcome.stderr) if not isinstance(one, str) else one for one in said]


def _how_lost(code: int | None, stderr: bytes) -> str:
    """Of a program that was gone when the judge asked."""
    how = "failed" if code is None else how_it_ended(code, stderr)
    return "failed" if how == "ended" else how


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
