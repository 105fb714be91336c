"""Reward ``metric``: a number that the environment noted of the play."""

from __future__ import annotations

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory


class Metric(Reward):
    """The metric itself, such as the ``return`` of environment ``gymnasium``. Abstains where the play failed, or has
    no metric of that name."""

    class Config(ComponentConfig):
        metric: str = "return"
        """The name under which it is in ``chat.metrics``."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        return None if trajectory.error is not None else trajectory.metrics.get(self.config.metric)
