"""Reward ``length``: a penalty for replies that are too long or too short."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory


class Length(Reward):
    """0.0 from ``min`` to ``max``; beyond, -1 x the distance / ``buffer``, and never less than -1.

    With ``min: 100, max: 200, buffer: 50``: 0 from 100 to 200, -0.5 at 75 and 225, -1 at 50 and below, and at 250 and
    above. The lengths of all replies of a play are added up. Abstains where the play failed.
    """

    class Config(ComponentConfig):
        max: PositiveInt | None = None
        """The longest that costs nothing."""
        min: Annotated[int, Field(ge=0)] = 0
        """The shortest that costs nothing; equal to ``max`` for a target."""
        buffer: PositiveInt = 1
        """How far beyond the reward reaches -1; 1: at once."""
        unit: Literal["tokens", "words", "characters"] = "tokens"
        """Tokens are those that the policy sampled; words are what white space separates."""

        @model_validator(mode="after")
        def _asks_something(self) -> Length.Config:
            if self.max is None and not self.min:
                raise ValueError("no limit is set: give max, min or both")
            if self.max is not None and self.min > self.max:
                raise ValueError(f"min {self.min} is above max {self.max}: no length is right")
            return self

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.error is not None:
            return None
        length, config = self._length(trajectory), self.config
        beyond = max(config.min - length, 0 if config.max is None else length - config.max, 0)
        return -min(1.0, beyond / config.buffer) if beyond else 0.0

    def _length(self, trajectory: Trajectory) -> int:
        texts = [turn.reply.text for turn in trajectory.turns]
        if self.config.unit == "words":
            return sum(len(text.split()) for text in texts)
        if self.config.unit == "characters":
            return sum(map(len, texts))
        if not trajectory.reply_tokens and any(texts):
            raise DataError(
                f"task {trajectory.task.id!r}: the reply's tokens were not counted: give their number (tokens), "
                "or set unit: characters"
            )
        return trajectory.reply_tokens
