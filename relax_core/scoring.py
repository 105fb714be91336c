"""Rewards of whole groups: which apply, their values, abstentions and failures, and the weighted sum."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.setup import RewardSetup
from relax_core.types import Group, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.asking import Asker
    from relax_core.config.schema import RewardSection, RunConfig
    from relax_core.interfaces import Reward
    from relax_core.plugins import Stack
    from relax_core.run import Run

Outcome = float | Mapping[str, float | None] | BaseException | None
"""What came out of asking a reward for a play: its ``RewardValue``, or what it raised."""

GRACE = 5.0
"""Seconds that a reward may take to end when it is told to; then nobody waits for it any more."""


class Graders(ABC):
    """Score groups: in this process, or in processes of their own."""

    @abstractmethod
    async def score(self, group: Group) -> None:
        """Fill ``rewards``, ``reward`` and ``raw_reward`` of the group's trajectories; failed plays have none."""

    @abstractmethod
    def failures_in_words(self) -> str:
        """The newest failure of each reward that ever failed, to be appended to a sentence."""

    @abstractmethod
    async def close(self) -> None:
        """Let every reward give back what it holds: connections, processes."""


def asks_policy(config: RunConfig, stack: Stack) -> bool:
    """Whether a reward of the run asks the run's own engine."""
    return any(
        stack.load("rewards", section.id).asks_policy(stack.config("rewards", section, f"rewards.{i}"))
        for i, section in enumerate(config.rewards)
    )


class Scorer(Graders):
    """Applies the run file's rewards. A reward that raises, returns NaN or is late abstains; the others go on."""

    def __init__(self, rewards: Sequence[tuple[RewardSection, Reward]], note: Callable[[str], None] = print) -> None:
        self.rewards, self.note = rewards, note
        self.failures: Counter[str] = Counter()
        """By reward name: how often it raised, gave NaN or inf, or was late."""
        self.last_failure: dict[str, str] = {}
        self.unmatched = 0
        """Groups to which no reward applied."""
        self.last_unmatched = ""

    @classmethod
    def of(cls, run: Run, note: Callable[[str], None] = print) -> Scorer:
        """With the rewards of a run file."""
        sections = enumerate(run.config.rewards)
        return cls([(s, run.stack.build("rewards", s, where=f"rewards.{i}")) for i, s in sections], note)

    def failures_in_words(self) -> str:
        newest = self.last_failure
        words = [f"; {name} failed {n} times, the last: {newest[name]}" for name, n in self.failures.items()]
        if self.unmatched:
            words.append(f"; {self.unmatched} groups had no reward, the last: {self.last_unmatched}")
        return "".join(words)

    async def score(self, group: Group) -> None:
        """See ``Graders``. A cancellation stays one: then nothing is filled in."""
        valid = [t for t in group.trajectories if t.error is None]
        if not valid:
            return
        used = [(section, reward) for section, reward in self.rewards if applies(section, group.task)]
        if not used:
            self._report_unmatched(group.task, valid)
        part = replace(group, trajectories=valid)
        found = await _all([outcomes(reward, part, section.timeout) for section, reward in used])
        for (section, _), values in zip(used, found, strict=True):
            for trajectory, value in zip(valid, values, strict=True):
                trajectory.rewards[section.label] = self._value(section.label, value, trajectory)
        weights = {section.label: section.weight for section, _ in used}
        for trajectory in valid:
            parts = [weights[name] * v for name, v in trajectory.rewards.items() if v is not None]
            trajectory.raw_reward = trajectory.reward = sum(parts) if parts else None

    async def begin(self, run: Run, policy: Asker | None, apart: bool = False) -> None:
        """Let every reward begin, before anything is scored; see ``RewardSetup``. Raises what one of them raises."""
        for i, (section, reward) in enumerate(self.rewards):
            asked = policy if type(reward).asks_policy(reward.config) else None
            await reward.begin(RewardSetup(run, f"rewards.{i}", section.label, asked, apart, self.note))

    async def close(self) -> None:
        for _, reward in self.rewards:
            await reward.close()

    def _report_unmatched(self, task: Task, plays: Sequence[Trajectory]) -> None:
        for trajectory in plays:
            trajectory.metrics["unmatched"] = 1.0
        self.unmatched += 1
        self.last_unmatched = unmatched(task, [section for section, _ in self.rewards])
        if self.unmatched == 1:
            self.note(self.last_unmatched)

    def _value(self, name: str, value: Outcome, trajectory: Trajectory) -> float | None:
        """The value, or None where the reward abstained or failed; a failure is counted on the trajectory."""
        found = total_or_problem(value)
        if isinstance(found, str):
            if name not in self.failures:
                self.note(f"rewards.{name} failed and abstains: {found}")
            self.failures[name] += 1
            self.last_failure[name] = found
            trajectory.metrics[f"{name}/failures"] = 1.0
            return None
        if isinstance(value, Mapping):  # components
            shown = {f"{name}/{key}": float(part) for key, part in value.items() if part is not None}
            trajectory.metrics.update(shown)
        return found


# --- which rewards apply ----------------------------------------------------------------------------------------------


def applies(section: RewardSection, task: Task) -> bool:
    """Whether a reward scores a task: of an environment that it names, with metadata that it asks for."""
    if section.environments is not None and task.environment not in section.environments:
        return False
    return all(
        key in task.metadata
        and any(_equal(task.metadata[key], one) for one in (wanted if isinstance(wanted, tuple) else (wanted,)))
        for key, wanted in section.when.items()
    )


def unmatched(task: Task, sections: Sequence[RewardSection]) -> str:
    """Why no reward scores a task: what it has, and what each reward asks for."""
    asked = "; ".join(f"{section.label} asks for {_asked(section)}" for section in sections)
    keys = sorted({key for section in sections for key in section.when})
    has = {key: task.metadata[key] for key in keys if key in task.metadata}
    missing = [key for key in keys if key not in task.metadata]
    metadata = f" and metadata {_short(has)}" if has else ""
    metadata += f" (without {', '.join(missing)})" if missing else ""
    return (
        f"task {task.id!r} has no reward: it is of environment {task.environment!r}{metadata}; {asked}: "
        "change when or environments, or add a reward"
    )


def _asked(section: RewardSection) -> str:
    wanted = [] if section.environments is None else [f"environments {_short(section.environments)}"]
    return " and ".join(wanted + ([f"metadata {_short(section.when)}"] if section.when else []))


def _equal(found: Any, wanted: Any) -> bool:
    """Equality of plain values; true is not 1, and an array equals nothing."""
    if isinstance(found, bool) != isinstance(wanted, bool):
        return False
    try:
        return bool(found == wanted)
    except Exception:
        return False


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


# --- asking one reward ------------------------------------------------------------------------------------------------


async def outcomes(reward: Reward, group: Group, timeout: float) -> list[Outcome]:
    """What a reward gives for each trajectory of a group, in order, errors as values.

    A reward that scores plays one by one keeps the values that came within ``timeout`` (seconds); one that compares
    them has all or none.
    """
    late = TimeoutError(f"no answer within {timeout:g} s")
    if not scores_groups(reward):
        return await _within([_one(reward, t) for t in group.trajectories], timeout, late)
    (found,) = await _within([_together(reward, group)], timeout, late)
    return found if isinstance(found, list) else [found] * len(group.trajectories)


def scores_groups(reward: Reward) -> bool:
    """Whether it needs a group's plays together: as its ``by_group`` says, else if it has its own ``score_group``."""
    from relax_core.interfaces import Reward as Base

    own = reward.by_group
    return type(reward).score_group is not Base.score_group if own is None else own


async def _one(reward: Reward, trajectory: Trajectory) -> Any:
    return await reward(trajectory)


async def _together(reward: Reward, group: Group) -> list[Any]:
    found = await reward.score_group(group)
    if len(found) != len(group.trajectories):
        raise ValueError(f"score_group gave {len(found)} values for {len(group.trajectories)} trajectories")
    return [_cancelled() if isinstance(value, asyncio.CancelledError) else value for value in found]


async def _within(calls: Sequence[Any], timeout: float, late: Exception) -> list[Any]:
    """The results of coroutines, or what they raised; ``late`` for those that take longer. All have ended, or were
    told to and given up."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        done = {task for task in tasks if task.done()}
    finally:
        await _end([task for task in tasks if not task.done()])
    return [_result(task) if task in done else late for task in tasks]


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # an error is no news any more
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE)


def _result(task: asyncio.Task[Any]) -> Any:
    """A task's result or error."""
    return _cancelled() if task.cancelled() else task.exception() or task.result()


def _cancelled() -> Exception:
    """A reward that cancels itself, or is cancelled by what it uses, has failed: when scoring itself is cancelled,
    nobody looks at results any more."""
    return RuntimeError("it was cancelled, and not by the run")


async def _all(calls: Sequence[Any]) -> list[Any]:
    """The results of coroutines that raise nothing of their own; a cancellation ends them all first."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end([task for task in tasks if not task.done()])


# --- values -----------------------------------------------------------------------------------------------------------


def total_or_problem(value: Outcome) -> float | str | None:
    """A reward's value: a finite number, the sum of its components, None, or in words why it is none of these."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return number_or_problem(value)
    parts = {key: number_or_problem(part) for key, part in value.items() if part is not None}
    for key, part in parts.items():
        if isinstance(part, str):
            return f"component {key!r}: {part}"
    numbers = [part for part in parts.values() if isinstance(part, float)]
    return sum(numbers) if numbers else None


def number_or_problem(value: Any) -> float | str:
    """A reward's value as a finite number, or in words why it is none. Raises what ended the task (cancellation)."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {' '.join(str(value).split())}"
    if isinstance(value, BaseException):
        raise value  # a cancelled task is no reward of 0
    if isinstance(value, str | bytes):
        return f"the value {_cut(value)} is not a number"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return f"the value {_cut(value)} is not a number"
    return number if math.isfinite(number) else f"the value {number}"


def _cut(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."
