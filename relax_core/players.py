"""Who plays: every member of a group plays its task at once, and their samples become the columns of rows."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_core.chat import Chat, PlayOver, Seat
from relax_core.config.schema import PlayLimits
from relax_core.errors import PluginError
from relax_core.hookspecs import SamplingFor
from relax_core.play_clock import PlayClock
from relax_core.types import Encoded, Group, Message, PlayError, Sample, Sampling, Stop, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.bus import Bus, Holder
    from relax_core.config.schema import SamplingSection
    from relax_core.interfaces import Columns, Engine, Environment, ModelAdapter
    from relax_core.prompts import Prompt
    from relax_core.run import Run

Memo = dict[tuple[int, ...], tuple[Sequence[Message], Encoded]]
"""Encoded histories, by the identity of their messages, which live as long: members of a group say the same first."""


class PlayCount(NamedTuple):
    """What is counted of a play, whether it is trained or not."""

    tokens: int
    rewrites: int
    stop: Stop
    error: PlayError | None


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
        self,
        run: Run,
        engine: Engine,
        adapter: ModelAdapter,
        environments: Mapping[str, Environment],
        bus: Bus | None = None,
    ) -> None:
        """``bus``: for the rows of groups; who asks for single plays alone needs none."""
        self.run, self.engine, self.adapter, self.environments, self.bus = run, engine, adapter, environments, bus
        self._limits = defaultdict(PlayLimits, {s.label: s.limits for s in run.config.environments})

    async def group(self, group: Group, prompt: Prompt, holder: Holder, ended: Callable[[], None]) -> Played:
        sampling = sampling_of(self.run.config.sampling)
        said = prompt.task.messages
        memo: Memo = {tuple(map(id, said)): (said, prompt.encoded)}
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
            assert self.bus is not None
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
        limits = self._limits[task.environment]
        clock = PlayClock(limits.seconds)
        encode = partial(self._encode, memo)
        chat = Chat(self.engine, self.adapter, sampling, seat, encode, limits, clock)
        trajectory = Trajectory(task, seat.attempt, seat.member, chat.turns, chat.samples)
        try:
            async with clock:
                await _returning_nothing(self.environments[task.environment].play(task, chat))
            trajectory.stop = chat.turns[-1].stop if chat.turns else Stop.DONE
        except BaseException as error:
            if over := _over(error):
                trajectory.stop = over.stop
            else:
                trajectory.stop, trajectory.error = self._failure(error, task, clock)
                await self.engine.health()  # a dead engine ends the run: it is no fault of this play
        finally:
            chat.end()
        _note(trajectory, chat)
        return trajectory, chat

    def _failure(self, error: BaseException, task: Task, clock: PlayClock) -> tuple[Stop, PlayError]:
        """What went wrong, as data. Raises again what is to end this process, or the task that plays."""
        where = f"environments.{task.environment}"
        if isinstance(error, TimeoutError) and clock.expired:
            seconds = self._limits[task.environment].seconds
            text = f"tools and environment took longer than limits.seconds ({seconds:g}), without the policy's time"
            return Stop.TIME, PlayError(where, "Timeout", text)
        playing = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError) and playing is not None and playing.cancelling()
        if cancelled or isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise error
        return Stop.ERROR, PlayError(where, type(error).__name__, str(error))

    def _encode(self, memo: Memo, history: list[Message]) -> Encoded:
        """Members of a group say the same first: encode it once. Messages are compared by identity (media are big)."""
        key = tuple(map(id, history))
        if key not in memo:
            memo[key] = (tuple(history), self.adapter.encode(history))
        return memo[key][1]


def sampling_of(section: SamplingSection) -> Sampling:
    return Sampling(section.temperature, section.max_new_tokens, section.top_p, section.top_k)


async def _returning_nothing(play: Awaitable[Any]) -> None:
    if (found := await play) is not None:
        raise TypeError(f"play returned a {type(found).__name__}; nothing is allowed: rewards score what was said")


def _over(error: BaseException) -> PlayOver | None:
    """A limit that was reached, maybe by one of several tasks of a play."""
    if isinstance(error, BaseExceptionGroup):
        return next((over for inner in error.exceptions if (over := _over(inner))), None)
    return error if isinstance(error, PlayOver) else None


def _note(trajectory: Trajectory, chat: Chat) -> None:
    """What the environment noted of the play; what is no number is an error of it."""
    for name, value in chat.metrics.items():
        if isinstance(value, int | float) and math.isfinite(value):
            trajectory.metrics[name] = float(value)
        elif trajectory.error is None:
            text = f"chat.metrics[{name!r}] is {value!r}; a finite number is allowed"
            trajectory.stop = Stop.ERROR
            trajectory.error = PlayError(f"environments.{trajectory.task.environment}", "ValueError", text)
    trajectory.metrics["rewrites"] = float(len(chat.rewrites))
    trajectory.answer = chat.answer


def count_of(trajectory: Trajectory) -> PlayCount:
    rewrites = int(trajectory.metrics.get("rewrites", 0))
    return PlayCount(trajectory.reply_tokens, rewrites, trajectory.stop, trajectory.error)


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
