"""Reward ``exact``: whether the last reply is the task's answer."""

from __future__ import annotations

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory


class Exact(Reward):
    """1.0 if the reply is the answer, or one of them where ``answer`` is a list, else 0.0.

    Abstains where the task has no answer, and where the play failed.
    """

    class Config(ComponentConfig):
        ignore_case: bool = False
        """Compare without regard to case."""
        strip: bool = True
        """Leave white space at both ends out of the comparison."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        answer = trajectory.task.answer
        if answer is None or trajectory.error is not None:
            return None
        allowed = answer if isinstance(answer, list | tuple) else [answer]
        return float(self._plain(trajectory.last_reply) in {self._plain(str(one)) for one in allowed})

    def _plain(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text
