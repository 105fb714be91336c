"""Rewards of whole groups: each reward's values, abstentions and failures, and their weighted sum."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.types import Group, Trajectory

if TYPE_CHECKING:
    from relax_core.config.schema import RewardSection
    from relax_core.interfaces import Reward
    from relax_core.run import Run


class Scorer:
    """Applies the run file's rewards. A reward that raises or returns NaN abstains; the others go on."""

    def __init__(self, run: Run) -> None:
        self.rewards: list[tuple[RewardSection, Reward]] = [
            (section, run.stack.build("rewards", section, where=f"rewards.{i}"))
            for i, section in enumerate(run.config.rewards)
        ]
        self.failures: Counter[str] = Counter()
        """By reward name: how often it raised or gave NaN or inf."""
        self.last_failure: dict[str, str] = {}

    async def score(self, group: Group) -> None:
        """Fill ``rewards``, ``reward`` and ``raw_reward`` of the group's trajectories; failed plays have none."""
        valid = [t for t in group.trajectories if t.error is None]
        weights: dict[str, float] = {}
        for section, reward in self.rewards:
            if section.environments is not None and group.task.environment not in section.environments:
                continue
            weights[section.label] = section.weight
            for trajectory, value in zip(valid, await self._values(section, reward, valid, group), strict=True):
                trajectory.rewards[section.label] = value
        for trajectory in valid:
            parts = [weights[name] * v for name, v in trajectory.rewards.items() if v is not None]
            trajectory.raw_reward = trajectory.reward = sum(parts) if parts else None

    async def _values(
        self, section: RewardSection, reward: Reward, valid: list[Trajectory], group: Group
    ) -> list[float | None]:
        try:
            found = await reward.score_group(replace(group, trajectories=valid))
            if len(found) != len(valid):
                raise ValueError(f"score_group gave {len(found)} values for {len(valid)} trajectories")
        except Exception as error:
            found = [error] * len(valid)
        return [self._value(section.label, value) for value in found]

    def _value(self, name: str, value: float | BaseException | None) -> float | None:
        if value is None:
            return None
        if isinstance(value, Exception):
            self._failed(name, f"{type(value).__name__}: {value}")
            return None
        if isinstance(value, BaseException):
            raise value  # a cancelled task is no reward of 0
        number = float(value)
        if not math.isfinite(number):
            self._failed(name, f"the value {number}")
            return None
        return number

    def _failed(self, name: str, reason: str) -> None:
        self.failures[name] += 1
        self.last_failure[name] = reason
