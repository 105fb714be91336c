"""Callback ``deepeyes-bonus``: pays for tools where another reward finds the answer right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relax_core.errors import nearest
from relax_core.hookspecs import Callback, GroupEvent
from relax_core.interfaces import ComponentConfig
from relax_plugin_deepeyes.reward import was_shown

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.run import Run
    from relax_core.types import Trajectory


class ToolBonus(Callback):
    """Adds ``weight`` to the reward of a play in which a tool has shown something, and whose ``reward`` is above
    ``threshold``: the conditional part of DeepEyes' reward, where a judge or another grader says what is right.

    A play that abstained or failed stays without a reward. Filters decide on the reward before the bonus.
    """

    class Config(ComponentConfig):
        """Settings of ``deepeyes-bonus``."""

        reward: str
        """Name of the reward, one of the run's, that says whether the answer is right."""
        threshold: float = 0.5
        """A play is right when that reward is above it."""
        weight: float = 1.2
        """What is added."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Config, run: RunConfig) -> Iterable[str]:
        names = [section.label for section in run.rewards]
        if config.reward not in names:
            near = nearest(config.reward, names) or f"; there are {', '.join(names)}"
            yield f"reward: no reward of this run is called {config.reward!r}{near}"

    def shape_rewards(self, run: Run, value: list[float | None], event: GroupEvent) -> list[float | None]:
        return [
            reward if reward is None else reward + self.config.weight * self._earned(trajectory)
            for reward, trajectory in zip(value, event.group.trajectories, strict=True)
        ]

    def _earned(self, trajectory: Trajectory) -> bool:
        found = trajectory.rewards.get(self.config.reward)
        return found is not None and found > self.config.threshold and was_shown(trajectory)
