"""``relax grade``: rewards tried on recorded replies, without a run, and compared with what they should have given.

A line of the file is ``{"grader", "gold", "response"}``, with what the grader needs besides: ``options`` (its settings,
and ``timeout``), ``metadata``, ``prompt``, ``tokens`` (of the reply), ``stop``, ``id``. ``reward`` is what is right:
a number, or null for a grader that should abstain. ``gold`` null or left out: the task has no answer. Other keys are
ignored, but those that look like a misspelt one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.errors import ConfigError, DataError, RelaxError, nearest
from relax_core.scoring import outcomes, total_or_problem
from relax_core.types import Group, Stop, Task, Trajectory, Turn, message, user

if TYPE_CHECKING:
    from relax_core.config.schema import RewardSection
    from relax_core.interfaces import Reward
    from relax_core.plugins import Stack

DISAGREE, BAD_ROWS = 3, 2
"""Exit codes: all rows could be graded, but some came out otherwise than they should; some rows are unusable, or their
grader failed and nothing says that it should."""

AT_ONCE = 16
"""Rows that are graded at the same time."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "grader": (str,),
    "gold": (object,),
    "response": (str,),
    "reward": (int, float, type(None)),
    "options": (dict,),
    "metadata": (dict,),
    "prompt": (str,),
    "tokens": (int,),
    "stop": (str,),
    "id": (str, int),
}
_MISSPELT = ("grader", "gold", "response", "reward", "options", "metadata")
_OWN = ("id", "name", "weight", "environments", "when")
"""Fields of a run file's reward that mean nothing here."""


@dataclass(frozen=True, slots=True)
class GradeRow:
    """A line of the file. ``judged``: it says what the reward should be."""

    line: int
    grader: str
    trajectory: Trajectory
    options: Mapping[str, Any] = field(default_factory=dict)
    judged: bool = False
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot be graded, and why."""

    line: int
    reason: str
    grader: str = ""


@dataclass(frozen=True, slots=True)
class Graded:
    """What came out: ``error`` is set where the grader failed, and so abstains. ``seconds``: how long it took."""

    row: GradeRow
    reward: float | None
    error: str | None
    seconds: float

    @property
    def agrees(self) -> bool | None:
        """Whether it is what it should be, to a millionth; None where the row does not say."""
        if not self.row.judged:
            return None
        if self.reward is None or self.row.expected is None:
            return self.reward is self.row.expected
        return abs(self.reward - self.row.expected) <= 1e-6 * max(1.0, abs(self.row.expected))


def main(path: Path, *, as_json: bool = False, plugins: Sequence[str] = (), run: Path | None = None) -> int:
    """Grade the rows of a file and print what came out, as tables or as one JSON document.

    ``plugins`` are activated besides the built-in ones. ``run``: a run file; then ``grader`` names one of its rewards,
    with the settings it has there. Returns 0 when every row could be graded and agrees with its ``reward`` where it
    has one, 3 when some disagree, and 2 when some rows cannot be used (which are listed; the others are graded).
    Raises RelaxError when nothing can be graded at all.
    """
    from relax_core import grade_report

    rows = list(read(path))
    graders = _graders(plugins, run)
    found = asyncio.run(grade(rows, graders))
    print(grade_report.to_json(path, found) if as_json else grade_report.to_text(path, found))
    if any(isinstance(one, BadRow) or (one.error is not None and not one.row.judged) for one in found):
        return BAD_ROWS
    return DISAGREE if any(isinstance(one, Graded) and one.agrees is False for one in found) else 0


def _graders(plugins: Sequence[str], run: Path | None) -> Graders:
    from relax_core.plugins import activate

    if run is None:
        return Graders(activate(plugins))
    from relax_core.config.resolve import load

    if plugins:
        raise ConfigError("--plugin: a run file names its plugins itself: give --run or --plugin")
    config, stack = load(run, ())
    return Graders(stack, {section.label: section for section in config.rewards})


# --- rows -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[GradeRow | BadRow]:
    """The lines of a file that are not blank. Raises DataError when it is missing, unreadable or empty."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error} (looked in {Path.cwd()}): name a readable file") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not any(line.strip() for line in lines):
        raise DataError(f"{path}: there is nothing in it: write one JSON object a line")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(path, number, line)


def _row(path: Path, number: int, line: bytes) -> GradeRow | BadRow:
    try:
        row = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return BadRow(number, f"not UTF-8 (byte {error.start + 1} of the line)")
    except (ValueError, RecursionError) as error:
        return BadRow(number, f"not JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(number, f"a JSON {type(row).__name__}, not an object")
    grader = str(row["grader"]) if isinstance(row.get("grader"), str) else ""
    problem = next(_problems(row), None)
    if problem is not None:
        return BadRow(number, problem, grader)
    prompt = (user(row["prompt"]),) if "prompt" in row else ()
    task = Task(str(row.get("id", f"{path.name}:{number}")), prompt, row.get("gold"), row.get("metadata") or {})
    stop = Stop(row.get("stop", "eos"))
    turn = Turn(prompt, message("assistant", row["response"]), stop, row.get("tokens", 0))
    trajectory = Trajectory(task, 0, 0, [turn], stop=stop)
    expected = None if row.get("reward") is None else float(row["reward"])
    return GradeRow(number, grader, trajectory, row.get("options") or {}, "reward" in row, expected)


def _problems(row: Mapping[str, Any]) -> Iterator[str]:
    for key in row:
        if key not in _TYPES and (near := nearest(key, _MISSPELT)):
            yield f"unknown key {key!r}{near}"
    for key in ("grader", "response"):
        if key not in row:
            yield f"has no {key!r}"
    for key, value in row.items():
        optional = value is None and key in ("options", "metadata")
        wrong = not isinstance(value, _TYPES.get(key, (object,))) or (isinstance(value, bool) and key not in ("gold",))
        if key in _TYPES and wrong and not optional:
            names = " or ".join(_JSON_NAMES[kind] for kind in _TYPES[key])
            yield f"{key!r} is a JSON {_JSON_NAMES.get(type(value), type(value).__name__)}; it must be {names}"
    if isinstance(row.get("reward"), int | float) and not abs(row["reward"]) <= 1e300:
        yield "'reward' is too large for a number"
    if isinstance(row.get("stop"), str) and row["stop"] not in set(Stop):
        yield f"'stop' is {row['stop']!r}; allowed are {', '.join(Stop)}"


_JSON_NAMES: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


# --- grading ----------------------------------------------------------------------------------------------------------


class Graders:
    """The rewards that rows ask for: one instance for each grader and its options, built when first asked for."""

    def __init__(self, stack: Stack, sections: Mapping[str, RewardSection] | None = None) -> None:
        self.stack, self.sections = stack, sections
        self._made: dict[str, tuple[RewardSection, Reward] | RelaxError] = {}

    def of(self, row: GradeRow) -> tuple[RewardSection, Reward]:
        """Raises RelaxError for an unknown grader or options that it does not take."""
        key = json.dumps([row.grader, row.options], sort_keys=True)
        if key not in self._made:
            try:
                self._made[key] = self._build(row)
            except RelaxError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, RelaxError):
            raise made
        return made

    def _build(self, row: GradeRow) -> tuple[RewardSection, Reward]:
        section = self._section(row)
        return section, self.stack.build("rewards", section, where="options" if row.options else "grader")

    def _section(self, row: GradeRow) -> RewardSection:
        from relax_core.config.schema import RewardSection
        from relax_core.config.validation import validate

        if self.sections is not None:
            if row.grader not in self.sections:
                near = nearest(row.grader, self.sections) or f"; it has {', '.join(self.sections)}"
                raise ConfigError(f"grader: the run file has no reward {row.grader!r}{near}")
            if row.options:
                raise ConfigError("options: the run file gives the reward its settings: leave them out")
            return self.sections[row.grader]
        self.stack.provided("rewards", row.grader, "grader")
        if own := [name for name in _OWN if name in row.options]:
            raise ConfigError(f"options: {own[0]!r} means nothing here: only settings of the grader, and timeout, do")
        return validate(RewardSection, {"id": row.grader, **row.options}, "options")

    async def close(self) -> None:
        for made in self._made.values():
            if not isinstance(made, RelaxError):
                await made[1].close()


async def grade(rows: Sequence[GradeRow | BadRow], graders: Graders) -> list[Graded | BadRow]:
    """Grade rows, several at the same time; the results are in the order of the rows."""
    found: list[Graded | BadRow] = [BadRow(row.line, "") for row in rows]
    for row in rows:
        if isinstance(row, GradeRow):
            with suppress(RelaxError):
                graders.of(row)  # now, so that no row's time includes it
    places = iter(range(len(rows)))

    async def work() -> None:
        for place in places:
            row = rows[place]
            found[place] = row if isinstance(row, BadRow) else await _grade(row, graders)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
    finally:
        await graders.close()
    return found


async def _grade(row: GradeRow, graders: Graders) -> Graded | BadRow:
    try:
        section, reward = graders.of(row)
    except RelaxError as error:
        return BadRow(row.line, str(error), row.grader)
    trajectory = row.trajectory
    started = time.perf_counter()
    (outcome,) = await outcomes(reward, Group("", row.line, trajectory.task, 0, [trajectory]), section.timeout)
    seconds = time.perf_counter() - started
    value = total_or_problem(outcome)
    return Graded(row, None, value, seconds) if isinstance(value, str) else Graded(row, value, None, seconds)
