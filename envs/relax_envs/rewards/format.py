"""Reward ``format``: whether the last reply has the form that was asked for, right or wrong."""

from __future__ import annotations

import re
from typing import Any

from pydantic import PositiveInt, field_validator, model_validator

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Stop, Trajectory


class Format(Reward):
    """1.0 if the reply meets every condition that is set, else 0.0. Abstains where the play failed."""

    class Config(ComponentConfig):
        pattern: str | None = None
        """A regular expression that the whole reply must match; ``.`` matches line ends too."""
        words: PositiveInt | None = None
        """The exact number of words, as white space separates them."""
        ended: bool = False
        """Whether the policy itself must have ended the reply, instead of being cut at the limit."""

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, pattern: str | None) -> str | None:
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
            return pattern

        @model_validator(mode="after")
        def _asks_something(self) -> Format.Config:
            if self.pattern is None and self.words is None and not self.ended:
                raise ValueError("no condition is set: give pattern, words or ended: true")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._pattern = None if config.pattern is None else re.compile(config.pattern, re.DOTALL)

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.error is not None:
            return None
        reply = trajectory.last_reply
        fits = (
            (self._pattern is None or self._pattern.fullmatch(reply) is not None)
            and (self.config.words is None or len(reply.split()) == self.config.words)
            and (not self.config.ended or (bool(trajectory.turns) and trajectory.turns[-1].stop == Stop.EOS))
        )
        return float(fits)
