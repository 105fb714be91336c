"""Reward ``gsm8k``: whether the number after ``####`` is the task's answer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.numbers import first_number, last_number, whole_number
from relax_envs.rewards.reply import abstains, final_part, unreadable

MARKER = "####"


class Gsm8k(Reward):
    """1.0 if the number that the reply states after its last ``####`` equals the answer exactly, else 0.0.

    - The first number of the first line with text behind the marker counts, whatever follows it: ``#### 42 apples``.
      No number there is a wrong answer, and so is a calculation (``#### 40+2``), a range or a ratio.
    - ``relax_envs.rewards.numbers`` says what a number is. ``42.0``, ``42.``, ``$42``, ``+42``, ``４２`` and ``42%``
      are 42, ``.5`` and ``1/2`` are 0.5, ``1,000`` and ``1e3`` are 1000; ``3,4`` is none. Compared as exact fractions.
    - Reasoning up to ``</think>`` is not read.
    - The answer is a number, a whole solution of the data set with its ``####``, or a list of either, of which one
      must be met.

    Abstains where the task has no answer and where the play failed; an answer without a number is an error of the row,
    which is counted.
    """

    class Config(ComponentConfig):
        strict: bool = True
        """Whether ``####`` is needed; if not, the last number of a reply without it counts."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if abstains(trajectory):
            return None
        answer = trajectory.task.answer
        allowed = [_gold(one) for one in (answer if isinstance(answer, list | tuple) else [answer])]
        if not allowed or None in allowed:
            raise unreadable(trajectory, answer, "a number, or a solution that ends with #### and a number")
        found = self._stated(final_part(trajectory.last_reply))
        return float(found is not None and found in allowed)

    def _stated(self, text: str) -> Fraction | None:
        _, marker, behind = text.rpartition(MARKER)
        if marker:
            return first_number(behind.strip().partition("\n")[0])
        return None if self.config.strict else last_number(text)


def _gold(answer: Any) -> Fraction | None:
    if isinstance(answer, str) and MARKER in answer:
        return first_number(answer.rpartition(MARKER)[2])
    return whole_number(answer)
