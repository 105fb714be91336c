"""Reward ``remote``: asks a server over HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PositiveInt

from relax_core.errors import RelaxError
from relax_core.interfaces import Reward, RewardValue
from relax_core.types import Group, Trajectory
from relax_envs.rewards.conversation import messages_of, plain
from relax_envs.rewards.http import JsonServer, ServerConfig, shown


class Remote(Reward):
    """The reward that a server gives to a POST request.

    The body is JSON: ``{"id", "environment", "messages", "response", "answer", "metadata", "stop", "tokens"}``, where
    ``messages`` are what was said before the last reply (``{"role", "content"}``, media as parts without their
    content) and ``response`` is the last reply. The answer is ``{"reward": number or null}``; null abstains, other keys
    are ignored. With ``batch`` the plays of a group are asked for at once: ``{"items": [body, ...]}``, answered by
    ``{"rewards": [number or null, ...]}`` in the same order.

    Connection errors, time-outs and the statuses 408, 425, 429 and 5xx are tried again, after a pause that doubles or
    the server's ``Retry-After``; any other status but 2xx (redirects too) is not. Then, and where the answer is not the
    JSON above, the play abstains, and it is counted as a failure with the reason. Abstains where the play failed.
    """

    class Config(ServerConfig):
        batch: bool = False
        """One request for the plays of a group, instead of one each."""
        media: bool = False
        """Whether images, sounds and videos are sent (base64); else only that they are there."""
        concurrency: PositiveInt = 32
        """Requests at the same time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.by_group = config.batch
        self._server = JsonServer(config, config.concurrency, "reward remote")

    async def close(self) -> None:
        """Closes the connections of the running loop."""
        await self._server.close()

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.error is not None:
            return None
        body = await asyncio.to_thread(self._body, trajectory) if self.config.media else self._body(trajectory)
        return _reward(await self._server.post(body), "reward")

    async def score_group(self, group: Group) -> Sequence[RewardValue | BaseException]:
        if not self.config.batch:
            return await super().score_group(group)
        played = [trajectory for trajectory in group.trajectories if trajectory.error is None]
        if not played:
            return [None] * len(group.trajectories)
        found = await self._server.post({"items": [self._body(trajectory) for trajectory in played]})
        given = found.get("rewards")
        if not isinstance(given, list) or len(given) != len(played):
            what = f"{len(given)} rewards" if isinstance(given, list) else shown(found)
            raise RelaxError(f"{self.config.url}: answered {what} to {len(played)} plays")
        rewards = iter([_or_error({"reward": value}) for value in given])
        return [None if trajectory.error is not None else next(rewards) for trajectory in group.trajectories]

    def _body(self, trajectory: Trajectory) -> dict[str, Any]:
        task = trajectory.task
        return {
            "id": task.id,
            "environment": task.environment,
            "messages": messages_of(trajectory, self.config.media),
            "response": trajectory.last_reply,
            "answer": plain(task.answer),
            "metadata": plain(task.metadata),
            "stop": str(trajectory.stop),
            "tokens": trajectory.reply_tokens,
        }


def _reward(found: Mapping[str, Any], key: str) -> float | None:
    if key not in found:
        raise RelaxError(f"the server's answer has no {key!r}: {shown(found)}")
    value = found[key]
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # more digits than a float has
        number = math.inf
    if not math.isfinite(number):
        raise RelaxError(f"the server's {key!r} is {shown(value)}: give a finite number, or null")
    return number


def _or_error(found: Mapping[str, Any]) -> float | RelaxError | None:
    try:
        return _reward(found, "reward")
    except RelaxError as error:
        return error
