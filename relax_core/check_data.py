"""The data of a run, looked at before it starts: some rows of every split, which are bad, and one as messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_core.bad_rows import sample_problem
from relax_core.errors import DataError
from relax_core.hook_manager import describe
from relax_core.keys import bits, stream
from relax_core.scoring import applies, unmatched
from relax_core.show_task import describe_task
from relax_core.tasks import Scanned, located
from relax_core.types import MEDIA_KINDS, Task

if TYPE_CHECKING:
    from relax_core.config.schema import EnvironmentSection, RunConfig
    from relax_core.interfaces import Environment

HEAD, RANDOM = 256, 64
"""Rows of each split that are looked at: so many at its beginning, and so many at random among the others."""

NAMED = 20
"""Bad rows of a split that are named, at most."""

Split = Literal["train", "eval"]


@dataclass(slots=True)
class SplitReport:
    """What was found in a split. ``bad``: rows that a run leaves out; ``problems``: why it cannot start."""

    size: int = 0
    looked_at: int = 0
    bad: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    example: list[str] = field(default_factory=list)
    """The first good task, one line for each message."""
    unrewarded: list[str] = field(default_factory=list)
    """Good tasks that no reward scores, and why."""

    def notes(self, where: str) -> Iterator[str]:
        """The bad rows, each in a line."""
        for line in self.bad[:NAMED]:
            yield f"{where}: bad row: {line}"
        if len(self.bad) > NAMED:
            yield f"{where}: {len(self.bad) - NAMED} more bad rows among the {self.looked_at:,} looked at"


def look(environment: Environment, section: EnvironmentSection, split: Split, run: RunConfig) -> SplitReport:
    """Look at a split. Nothing is decoded; whatever an environment raises becomes a problem in one line."""
    where = f"environments.{section.label}"
    found = SplitReport()
    try:
        tasks = environment.tasks(split)
        found.size = len(tasks)
    except Exception as error:
        found.problems.append(f"{where}: the {split} split cannot be read: {describe(error)}")
        return found
    if not found.size:
        found.problems.append(f"{where}: the {split} split has no task: check its path and split")
        return found
    wrong: list[str] = []
    seen: dict[str, int] = {}
    places = sampled(found.size, run.seed)
    known = set(islice(tasks.bad_places, NAMED)) if isinstance(tasks, Scanned) else set()
    bad: set[int] = set()
    for place in sorted({*places, *known}):
        found.looked_at += 1
        before = len(found.bad)
        task = _look_at(tasks, place, seen, found, wrong)
        bad |= {place} if len(found.bad) > before else set()
        if task is not None and not any(
            applies(r, named := replace(task, environment=section.label)) for r in run.rewards
        ):
            found.unrewarded.append(unmatched(named, run.rewards))
    if wrong:
        found.problems.append(
            f"{where}: {len(wrong)} of {found.looked_at} {split} tasks looked at are wrong, first: {wrong[0]}"
        )
    bad |= set(tasks.bad_places) if isinstance(tasks, Scanned) else set()
    if problem := sample_problem(bad, {*places, *known}, found.size, HEAD, run.data.max_bad_fraction):
        found.problems.append(
            f"{where}: {found.bad[0]}{f' (and {len(bad) - 1} more)' if len(bad) > 1 else ''}: {problem}"
        )
    if found.unrewarded:
        found.problems.append(
            f"{where}: no reward for {len(found.unrewarded)} of {found.looked_at} {split} tasks looked at, first: "
            f"{found.unrewarded[0]}"
        )
    return found


def _look_at(
    tasks: Sequence[Task], place: int, seen: dict[str, int], found: SplitReport, wrong: list[str]
) -> Task | None:
    """The task at a place, if it is good."""
    try:
        task = tasks[place]
    except DataError as error:
        found.bad.append(str(error))
        return None
    except Exception as error:
        wrong.append(f"task {place}: {describe(error)}")
        return None
    problem = task_problem(task)
    if problem is None and seen.setdefault(task.id, place) != place:
        problem = f"has the id {task.id!r} of task {seen[task.id]}: ids must be unique"
    if problem is not None:
        wrong.append(f"task {place} {problem}")
    elif lost := missing_file(task):
        found.bad.append(str(located(tasks, place, DataError(lost))))
    else:
        found.example = found.example or describe_task(task)
        return task
    return None


def sampled(size: int, seed: int, head: int = HEAD, others: int = RANDOM) -> list[int]:
    """Places of a split to look at, ascending: all of a small one, else its beginning and some others at random."""
    if size <= head + others:
        return list(range(size))
    start = stream(seed, "check", size)
    found = {head + bits(start, i) % (size - head) for i in range(others)}
    return [*range(head), *sorted(found)]


def task_problem(task: object) -> str | None:
    """What is wrong with one task: a fault of its environment, not of a row."""
    if not isinstance(task, Task):
        return f"is a {type(task).__name__}; tasks() must give relax_core.types.Task"
    if not isinstance(task.id, str) or not task.id:
        return f"has the id {task.id!r}; an id is text that is unique in the environment"
    if not task.messages:
        return f"{task.id!r} has no message"
    if not any(message.parts for message in task.messages):
        return f"{task.id!r} has only empty messages"
    return None


def missing_file(task: Task) -> str | None:
    """The first medium of a task whose file is not there."""
    for message in task.messages:
        for part in message.media():
            if isinstance(part.source, Path) and not part.source.is_file():
                return f"{MEDIA_KINDS[type(part)]} {part.source}: no such file"
    return None
