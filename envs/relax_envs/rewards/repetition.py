"""Reward ``repetition``: a penalty for replies that say the same again and again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.words import tokens

LOOKED_AT = 200_000
"""Characters of each reply, its last ones, that are looked at."""


class Repetition(Reward):
    """Minus ``max_penalty`` x the share of n-grams that occurred before in the play: 0 when none did.

    N-grams are of words and signs, in scripts without spaces of characters. A run of more than 50 letters without a
    break is no word and counts by characters, so that ``hahaha...`` and ``aaaa...`` are found. All replies of the play
    count, n-grams across two of them do not; a reply of fewer than n words has none. Abstains where the play failed.
    """

    class Config(ComponentConfig):
        n: PositiveInt = 3
        """Words of an n-gram."""
        max_penalty: Annotated[float, Field(gt=0)] = 1.0
        """The reward of a reply that only repeats itself is near minus this."""
        allowed: Annotated[float, Field(ge=0, lt=1)] = 0.0
        """Share of repeated n-grams that costs nothing; what is above it is scaled to go from 0 to 1 again."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.error is not None:
            return None
        share = repeated([turn.reply.text for turn in trajectory.turns], self.config.n)
        above = max(0.0, share - self.config.allowed) / (1 - self.config.allowed)
        return -self.config.max_penalty * above if above else 0.0


def repeated(texts: list[str], n: int) -> float:
    """The share of the texts' n-grams that are not the first of their kind."""
    grams = [gram for text in texts for gram in _grams(tokens(text[-LOOKED_AT:].casefold()), n)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _grams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))
