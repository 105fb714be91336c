"""Plays as rewards see them, for tests of rewards: a task, and what the policy replied."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.interfaces import Reward
from relax_core.types import Group, PlayError, Stop, Task, Trajectory, Turn, message, user


def played(
    *replies: str,
    answer: Any = None,
    metadata: Mapping[str, Any] | None = None,
    tokens: int = 1,
    stop: Stop = Stop.EOS,
    failed: bool = False,
) -> Trajectory:
    """A play of one turn for each reply, of ``tokens`` tokens each, all of which end by ``stop``."""
    task = Task("t", (user("?"),), answer, metadata or {})
    turns = [Turn((user("?"),), message("assistant", reply), stop, tokens) for reply in replies]
    error = PlayError("play", "ValueError", "oops") if failed else None
    return Trajectory(task, 0, 0, turns, stop=stop, error=error)


def group_of(trajectories: Sequence[Trajectory]) -> Group:
    """Plays of the first one's task."""
    return Group("g", 0, trajectories[0].task, 0, list(trajectories))


def rewarded(cls: type[Reward], trajectory: Trajectory, **settings: Any) -> Any:
    """What a reward with these settings gives; its own errors are raised."""
    return asyncio.run(cls(cls.Config.model_validate(settings))(trajectory))
