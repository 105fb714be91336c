"""Reward ``number``: whether the last number of the reply is the task's answer."""

from __future__ import annotations

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.numbers import last_number, whole_number
from relax_envs.rewards.reply import abstains, final_part, unreadable


class Number(Reward):
    """1.0 if the last number of the last reply equals the answer exactly (1,000 = 1000 = 1000.0), else 0.0.

    ``relax_envs.rewards.numbers`` says what a number is: ``$1,000``, ``-3``, ``.5``, ``1/2``, ``1e3``, ``50%`` (which
    is 50). Reasoning up to ``</think>`` is not read. Abstains where the task has no answer and where the play failed;
    an answer that is no number is an error of the row, which is counted.
    """

    Config = ComponentConfig

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if abstains(trajectory):
            return None
        answer = whole_number(trajectory.task.answer)
        if answer is None:
            raise unreadable(trajectory, trajectory.task.answer, "a number, such as 42, 0.5 or 1,000")
        return float(last_number(final_part(trajectory.last_reply)) == answer)
