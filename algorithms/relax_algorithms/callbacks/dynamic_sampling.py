"""Trains only groups whose plays differ in reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from pydantic import PositiveInt, model_validator

from relax_core.errors import RelaxError
from relax_core.hookspecs import Callback, GroupEvent
from relax_core.interfaces import ComponentConfig

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.run import Run

SHOWN = 3
"""Reasons that the error names."""


class DynamicSampling(Callback):
    """Dynamic sampling (DAPO, arXiv:2503.14476): a group whose rewards are all equal teaches nothing and is filtered.

    It decides on the rewards as they were before shaping, of the plays that still have one after it. A filtered group
    gives its slot back and the next task is played instead, so that each step trains as many groups as ever; the metric
    ``groups/filtered`` counts them. After ``max_attempts`` times ``groups_per_step`` filtered groups in a row the run
    ends with an error.
    """

    class Config(ComponentConfig):
        """Settings of ``dynamic-sampling``."""

        min_mean: float | None = None
        """Also filtered: groups whose mean reward is below it; default: none."""
        max_mean: float | None = None
        """Also filtered: groups whose mean reward is above it; default: none."""
        max_attempts: PositiveInt = 20
        """The run ends when so many times groups_per_step groups in a row were filtered and none was kept."""

        @model_validator(mode="after")
        def _mean_between(self) -> Self:
            if self.min_mean is not None and self.max_mean is not None and self.min_mean > self.max_mean:
                raise ValueError(
                    f"min_mean: found {self.min_mean}, above max_mean ({self.max_mean}): every group would be filtered"
                )
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.in_a_row: Counter[str] = Counter()
        """Groups filtered since one was kept, by reason."""

    @classmethod
    def check(cls, config: Config, run: RunConfig) -> Iterable[str]:
        if run.group_size < 2:
            yield (
                f"group_size is {run.group_size}: the rewards of a group of one are always equal and every group would "
                "be filtered: set group_size to 2 or more, or leave dynamic-sampling out"
            )

    def filter_group(self, run: Run, value: str | None, event: GroupEvent) -> str | None:
        rewards = [t.raw_reward for t in event.group.trajectories if t.reward is not None and t.raw_reward is not None]
        if not rewards:
            return value  # it fails, or was left without a reward: not a matter of its rewards
        reason = value or self._objection(rewards)
        if reason is None:
            self.in_a_row.clear()
            return None
        self.in_a_row[reason] += 1
        limit = self.config.max_attempts * run.config.groups_per_step
        if self.in_a_row.total() >= limit:
            raise RelaxError(self._end(run, limit))
        return reason

    def _objection(self, rewards: list[float]) -> str | None:
        low, high, mean = min(rewards), max(rewards), math.fsum(rewards) / len(rewards)
        if low == high:
            return f"all rewards are {low:g}"
        if self.config.min_mean is not None and mean < self.config.min_mean:
            return f"the mean reward is below {self.config.min_mean:g}"
        if self.config.max_mean is not None and mean > self.config.max_mean:
            return f"the mean reward is above {self.config.max_mean:g}"
        return None

    def _end(self, run: Run, limit: int) -> str:
        config = run.config
        found = ", ".join(f"{count} because {reason}" for reason, count in self.in_a_row.most_common(SHOWN))
        others = len(self.in_a_row) - SHOWN
        return (
            f"dynamic-sampling: {limit} groups in a row were filtered and none was kept: {found}"
            f"{f', and {others} more reasons' if others > 0 else ''}; allowed are fewer than max_attempts "
            f"({self.config.max_attempts}) x groups_per_step ({config.groups_per_step}): take easier tasks where "
            f"rewards are low and harder ones where they are high, raise group_size ({config.group_size}) so that "
            "plays of a task differ, or look at the rewards"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self.in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row = Counter(state.get("in_a_row", {}))
