"""Rewards of whole groups: each reward's values, abstentions and failures, and their weighted sum."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.types import Group, Trajectory

if TYPE_CHECKING:
    from relax_core.config.schema import RewardSection
    from relax_core.interfaces import Reward
    from relax_core.run import Run


class Scorer:
    """Applies the run file's rewards. A reward that raises or returns NaN abstains; the others go on."""

    def __init__(self, rewards: Sequence[tuple[RewardSection, Reward]], note: Callable[[str], None] = print) -> None:
        self.rewards, self.note = rewards, note
        self.failures: Counter[str] = Counter()
        """By reward name: how often it raised or gave NaN or inf."""
        self.last_failure: dict[str, str] = {}

    @classmethod
    def of(cls, run: Run, note: Callable[[str], None] = print) -> Scorer:
        """With the rewards of a run file."""
        sections = enumerate(run.config.rewards)
        return cls([(s, run.stack.build("rewards", s, where=f"rewards.{i}")) for i, s in sections], note)

    def failures_in_words(self) -> str:
        """The newest failure of each reward that ever failed, to be appended to a sentence."""
        newest = self.last_failure
        return "".join(f"; {name} failed {n} times, the last: {newest[name]}" for name, n in self.failures.items())

    async def score(self, group: Group) -> None:
        """Fill ``rewards``, ``reward`` and ``raw_reward`` of the group's trajectories; failed plays have none."""
        valid = [t for t in group.trajectories if t.error is None]
        weights: dict[str, float] = {}
        for section, reward in self.rewards:
            if section.environments is not None and group.task.environment not in section.environments:
                continue
            weights[section.label] = section.weight
            for trajectory, value in zip(valid, await self._values(section, reward, valid, group), strict=True):
                trajectory.rewards[section.label] = self._value(section.label, value, trajectory)
        for trajectory in valid:
            parts = [weights[name] * v for name, v in trajectory.rewards.items() if v is not None]
            trajectory.raw_reward = trajectory.reward = sum(parts) if parts else None

    async def _values(
        self, section: RewardSection, reward: Reward, valid: list[Trajectory], group: Group
    ) -> list[float | BaseException | None]:
        try:
            found = await reward.score_group(replace(group, trajectories=valid))
            if len(found) != len(valid):
                raise ValueError(f"score_group gave {len(found)} values for {len(valid)} trajectories")
        except Exception as error:
            found = [error] * len(valid)
        return found

    def _value(self, name: str, value: float | BaseException | None, trajectory: Trajectory) -> float | None:
        """The value, or None where the reward abstained or failed; a failure is counted on the trajectory."""
        if value is None:
            return None
        found = number_or_problem(value)
        if isinstance(found, float):
            return found
        if name not in self.failures:
            self.note(f"rewards.{name} failed and abstains: {found}")
        self.failures[name] += 1
        self.last_failure[name] = found
        trajectory.metrics[f"{name}/failures"] = 1.0
        return None


def number_or_problem(value: Any) -> float | str:
    """A reward's value as a finite number, or in words why it is none. Raises what ended the task (cancellation)."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, BaseException):
        raise value  # a cancelled task is no reward of 0
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"the value {value!r} is not a number"
    return number if math.isfinite(number) else f"the value {number}"
