"""A reward: a number for a trajectory, or None to abstain."""

from __future__ import annotations

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory


class Near(Reward):
    """The share of the answer's letters that the last reply has in their places."""

    class Config(ComponentConfig):
        ignore_case: bool = True
        """Compare without case."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        answer, reply = str(trajectory.task.answer or ""), trajectory.last_reply
        if not answer:
            return None  # nothing to compare with: abstain, which is not a reward of 0
        if self.config.ignore_case:
            answer, reply = answer.casefold(), reply.casefold()
        return sum(a == b for a, b in zip(answer, reply, strict=False)) / len(answer)
