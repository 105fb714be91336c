"""Reward ``number``: whether the last number of the reply is the task's answer."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
LONGEST = 100
"""Digits of a number that is compared; a longer one is a wrong answer."""


class Number(Reward):
    """1.0 if the last number in the last reply equals the answer exactly (1,000 = 1000 = 1000.0), else 0.0.

    Abstains where the answer is no number, and where the play failed.
    """

    Config = ComponentConfig

    async def __call__(self, trajectory: Trajectory) -> float | None:
        answer = value_of(str(trajectory.task.answer))
        if answer is None or trajectory.error is not None:
            return None
        found = NUMBER.findall(trajectory.last_reply)
        return float(bool(found) and value_of(found[-1]) == answer)


def value_of(text: str) -> Decimal | None:
    """The exact value of a number with thousands separators, None for anything else."""
    if len(text) > LONGEST or not NUMBER.fullmatch(text.strip()):
        return None
    try:
        return Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
