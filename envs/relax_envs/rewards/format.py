"""Reward ``format``: whether the last reply has the form that was asked for, right or wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Stop, Trajectory
from relax_envs.rewards.reply import end_token_stages

Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")]


class Format(Reward):
    """1.0 if the reply meets every condition that is set, else 0.0. With none set: ``tags: [think, answer]``.

    Special tokens at the end of the reply (``<|im_end|>``, ``</s>`` ...) are no part of its form, except where it has
    that form only with them: ``</s>`` may be a tag. Abstains where the play failed.
    """

    class Config(ComponentConfig):
        tags: tuple[Tag, ...] | None = None
        """The reply is ``<tag>content</tag>`` for each of these, in this order, over as many lines as it likes: each
        tag once, none inside another, and nothing but white space between and around them."""
        think_in_prompt: bool = False
        """The prompt's template has opened the first tag already: the reply begins inside it and must not open it."""
        empty: bool = False
        """Whether there may be nothing between two tags."""
        pattern: str | None = None
        """A regular expression that the whole reply must match; ``.`` matches line ends too. One whose matching time
        explodes (``(a+)+b``) stops the run while it matches."""
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

        @field_validator("tags")
        @classmethod
        def _differ(cls, tags: tuple[str, ...] | None) -> tuple[str, ...] | None:
            if tags is not None and (not tags or len(set(tags)) < len(tags)):
                raise ValueError("list one tag or more, each once, such as [think, answer]")
            return tags

        @property
        def asked_tags(self) -> tuple[str, ...]:
            """The tags that a reply must have; none when only other conditions are set."""
            if self.tags is not None:
                return self.tags
            others = self.pattern is not None or self.words is not None or self.ended
            return () if others else ("think", "answer")

        @model_validator(mode="after")
        def _goes_together(self) -> Format.Config:
            if not self.asked_tags and (self.think_in_prompt or self.empty):
                name = "think_in_prompt" if self.think_in_prompt else "empty"
                raise ValueError(f"{name} is about tags, and none are asked for: give tags, such as [think, answer]")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._pattern = None if config.pattern is None else re.compile(config.pattern, re.DOTALL)

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.error is not None:
            return None
        config, reply = self.config, trajectory.last_reply
        stages = end_token_stages(reply)
        opened, empty = config.think_in_prompt, config.empty
        fits = (
            (not config.asked_tags or any(has_tags(text, config.asked_tags, opened, empty) for text in stages))
            and (self._pattern is None or any(self._pattern.fullmatch(text) for text in (reply, *stages)))
            and (config.words is None or len(stages[-1].split()) == config.words)
            and (not config.ended or (bool(trajectory.turns) and trajectory.turns[-1].stop == Stop.EOS))
        )
        return float(fits)


def has_tags(text: str, tags: Sequence[str], opened: bool = False, empty: bool = False) -> bool:
    """Whether a text is made of these tags, one behind the other, each once. ``opened``: the first is open already."""
    place = 0
    for i, tag in enumerate(tags):
        start, end = f"<{tag}>", f"</{tag}>"
        inside = opened and i == 0
        if text.count(start) != (not inside) or text.count(end) != 1:
            return False
        begin = place if inside else text.find(start)
        finish = text.find(end)
        if begin < place or text[place:begin].strip() or finish < begin:
            return False
        content = text[begin + (0 if inside else len(start)) : finish]
        if not (empty or content.strip()):
            return False
        place = finish + len(end)
    return not text[place:].strip()
