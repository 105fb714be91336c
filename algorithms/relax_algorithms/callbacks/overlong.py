"""A penalty for plays that come near a length limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.hookspecs import Callback, GroupEvent
from relax_core.interfaces import ComponentConfig

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.run import Run


class Overlong(Callback):
    """Soft overlong punishment (DAPO, arXiv:2503.14476): takes up to ``weight`` from the reward of a long play.

    A play that abstained or failed stays without a reward. Filters decide on the reward before this penalty.
    """

    class Config(ComponentConfig):
        """Settings of ``overlong``."""

        limit: PositiveInt | None = None
        """L: sampled tokens of a whole play, over all of its turns, from which the full penalty is taken; default:
        sampling.max_new_tokens, which is right for plays of one turn."""
        buffer: NonNegativeInt
        """B: over the last so many tokens before the limit the penalty grows from 0 to 1; 0: nothing up to the limit,
        everything beyond it."""
        weight: PositiveFloat = 1.0
        """The full penalty."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Config, run: RunConfig) -> Iterable[str]:
        limit = _limit(config, run)
        if config.buffer > limit:
            default = "" if config.limit else " (sampling.max_new_tokens, the default)"
            yield (
                f"buffer: found {config.buffer}, more than limit {limit}{default}: even an empty play would be "
                "penalised: lower buffer, or raise limit"
            )

    def shape_rewards(self, run: Run, value: list[float | None], event: GroupEvent) -> list[float | None]:
        limit, buffer, weight = _limit(self.config, run.config), self.config.buffer, self.config.weight
        tokens = [trajectory.reply_tokens for trajectory in event.group.trajectories]
        return [
            reward if reward is None else reward + weight * penalty(length, limit, buffer)
            for reward, length in zip(value, tokens, strict=True)
        ]


def penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then falling evenly to -1 at ``limit``, and -1 beyond."""
    if length <= limit - buffer:
        return 0.0
    if length > limit:
        return -1.0
    return (limit - buffer - length) / buffer


def _limit(config: Overlong.Config, run: RunConfig) -> int:
    return config.limit or run.sampling.max_new_tokens
