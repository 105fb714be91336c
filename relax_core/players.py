"""Who plays: every member of a group plays its task at once, and their samples become the columns of rows."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.chat import Chat, Seat
from relax_core.errors import PluginError
from relax_core.hookspecs import SamplingFor
from relax_core.types import Encoded, Group, Message, PlayError, Sample, Sampling, Stop, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.bus import Bus, Holder
    from relax_core.config.schema import SamplingSection
    from relax_core.interfaces import Columns, Engine, Environment, ModelAdapter
    from relax_core.prompts import Prompt
    from relax_core.run import Run

Memo = dict[Any, Encoded]
"""Encoded histories, by the identity of their messages: members of a group say the same first."""


class PlayCount(NamedTuple):
    """What is counted of a play, whether it is trained or not."""

    tokens: int
    rewrites: int
    truncated: bool
    error: str | None
    """Where and why it failed."""


@dataclass(frozen=True, slots=True)
class Played:
    """A group that was played. ``rows``: how many it put on the bus."""

    rows: int
    plays: Sequence[PlayCount]


class Players(ABC):
    """Play in this process, or pass on to processes that do; the engine's ``enter`` and ``leave`` are the caller's."""

    @abstractmethod
    async def group(self, group: Group, prompt: Prompt, holder: Holder, ended: Callable[[], None]) -> Played:
        """Play a group that ``holder`` has opened, and put its rows on the bus; who called closes it.

        ``ended`` is called as each member ends its play.
        """

    @abstractmethod
    async def single(
        self, task: Task, seat: Seat, sampling: Sampling, evaluation: str | None, memo: Memo
    ) -> Trajectory:
        """Play one member of a task. ``memo``: shared by the plays of a task; it may be ignored."""

    def hold(self, rows: Mapping[str, Columns]) -> None:
        """Rows need their media, which this process's store has: keep them until ``forget``."""

    def forget(self, rows: Mapping[str, Columns]) -> None:
        """Rows are gone, and need their media no more."""


class Player(Players):
    """Plays in this process; what goes wrong in a play becomes data of its trajectory."""

    def __init__(
        self, run: Run, engine: Engine, adapter: ModelAdapter, environments: Mapping[str, Environment], bus: Bus
    ) -> None:
        self.run, self.engine, self.adapter, self.environments, self.bus = run, engine, adapter, environments, bus

    async def group(self, group: Group, prompt: Prompt, holder: Holder, ended: Callable[[], None]) -> Played:
        sampling = sampling_of(self.run.config.sampling)
        memo: Memo = {tuple(map(id, prompt.task.messages)): prompt.encoded}
        plays = []
        for member in range(self.run.config.group_size):
            seat = Seat(self.run.config.seed, group.task.id, group.attempt, member, (group.serial,))
            plays.append(asyncio.create_task(self._member(group.task, seat, sampling, memo, ended)))
        try:
            played = await asyncio.gather(*plays)
        finally:
            for play in plays:
                play.cancel()
        group.trajectories = [trajectory for trajectory, _ in played]
        rows = rows_of(group)
        self.hold(rows)
        for _, chat in played:
            chat.close()
        if rows:
            await self.bus.put(rows, holder, group.id)
        return Played(len(rows), [count_of(t) for t in group.trajectories])

    def hold(self, rows: Mapping[str, Columns]) -> None:
        self.adapter.media.retain(media_keys(rows))

    def forget(self, rows: Mapping[str, Columns]) -> None:
        self.adapter.media.release(media_keys(rows))

    async def _member(
        self, task: Task, seat: Seat, sampling: Sampling, memo: Memo, ended: Callable[[], None]
    ) -> tuple[Trajectory, Chat]:
        try:
            return await self._play(task, seat, sampling, None, memo)
        finally:
            ended()

    async def single(
        self, task: Task, seat: Seat, sampling: Sampling, evaluation: str | None, memo: Memo
    ) -> Trajectory:
        trajectory, chat = await self._play(task, seat, sampling, evaluation, memo)
        chat.close()
        return trajectory

    async def _play(
        self, task: Task, seat: Seat, sampling: Sampling, evaluation: str | None, memo: Memo
    ) -> tuple[Trajectory, Chat]:
        """The trajectory, and the chat that still holds its media: close it when the rows are made."""
        asked = sampling
        sampling = self.run.stack.pipe("sampling_request", self.run, asked, SamplingFor(task, evaluation))
        if evaluation is None and replace(sampling, max_new_tokens=asked.max_new_tokens) != asked:
            raise PluginError(
                f"sampling_request: a hook changed the training play of {task.id} from {asked} to {sampling}; only "
                "max_new_tokens may change: the trainer computes log-probs of the run's own distribution"
            )
        chat = Chat(self.engine, self.adapter, sampling, seat, lambda history: self._encode(history, memo))
        trajectory = Trajectory(task, seat.attempt, seat.member, chat.turns, chat.samples)
        try:
            await self.environments[task.environment].play(task, chat)
        except Exception as error:
            await self.engine.health()  # a dead engine ends the run: it is no fault of this play
            trajectory.error = PlayError(f"environments.{task.environment}", type(error).__name__, str(error))
            trajectory.stop = Stop.ERROR
        else:
            trajectory.stop = chat.turns[-1].stop if chat.turns else Stop.DONE
        trajectory.metrics["rewrites"] = float(len(chat.rewrites))
        return trajectory, chat

    def _encode(self, history: list[Message], memo: Memo) -> Encoded:
        """Members of a group say the same first: encode it once. Messages are compared by identity (media are big)."""
        key = tuple(map(id, history))
        if key not in memo:
            memo[key] = self.adapter.encode(history)
        return memo[key]


def sampling_of(section: SamplingSection) -> Sampling:
    return Sampling(section.temperature, section.max_new_tokens, section.top_p, section.top_k)


def count_of(trajectory: Trajectory) -> PlayCount:
    error = trajectory.error
    return PlayCount(
        tokens=trajectory.reply_tokens,
        rewrites=int(trajectory.metrics.get("rewrites", 0)),
        truncated=trajectory.stop is Stop.LENGTH,
        error=f"{error.where}: {error.type}: {error.text}" if error else None,
    )


def rows_of(group: Group) -> dict[str, Columns]:
    """The bus rows of a group's samples, by row id; failed plays and samples without sampled tokens give none."""
    rows: dict[str, Columns] = {}
    for trajectory in group.trajectories:
        if trajectory.error is None:
            for i, sample in enumerate(trajectory.samples):
                if sample.sampled:
                    rows[f"{group.id}/{trajectory.member}/{i}"] = _columns(sample, group)
    return rows


def _columns(sample: Sample, group: Group) -> Columns:
    import numpy as np

    return {
        "tokens": np.asarray(sample.ids, np.int32),
        "mask": np.asarray(sample.mask, np.int8),
        "logprobs": np.asarray(sample.logprobs, np.float32),
        "versions": np.asarray(sample.versions, np.int32),
        "positions": sample.positions,
        "media": sample.media,
        "played": group,
    }


def media_keys(rows: Mapping[str, Columns]) -> list[str]:
    """One entry for each use of a medium's features by a row."""
    return [ref.key for columns in rows.values() for ref in columns["media"]]
