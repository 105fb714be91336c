"""The rollout: every admitted group's members play their task at once, and their samples become rows on the bus."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.admission import Outcome
from relax_core.chat import Chat, Seat
from relax_core.errors import PluginError, RelaxError
from relax_core.hookspecs import GroupEvent, SamplingFor
from relax_core.types import (
    Encoded,
    Group,
    Message,
    PlayError,
    Sample,
    Sampling,
    Stop,
    Task,
    Trajectory,
)

if TYPE_CHECKING:
    from relax_core.admission import Admission, Ticket
    from relax_core.bus import Bus
    from relax_core.config.schema import SamplingSection
    from relax_core.feed import Feed
    from relax_core.interfaces import Columns, Engine, Environment, ModelAdapter
    from relax_core.prompts import Prompt
    from relax_core.run import Run


MOST_ERRORS = 50
OTHER_ERRORS = "other errors"


class Player:
    """Plays one member of one task; what goes wrong in a play becomes data of its trajectory."""

    def __init__(
        self, run: Run, engine: Engine, adapter: ModelAdapter, environments: Mapping[str, Environment]
    ) -> None:
        self.run, self.engine, self.adapter, self.environments = run, engine, adapter, environments

    async def play(
        self, task: Task, seat: Seat, sampling: Sampling, evaluation: str | None, encoded: dict[Any, Encoded]
    ) -> tuple[Trajectory, Chat]:
        """The trajectory, and the chat that still holds its media: close it when the rows are made."""
        asked = sampling
        sampling = self.run.stack.pipe("sampling_request", self.run, asked, SamplingFor(task, evaluation))
        if evaluation is None and replace(sampling, max_new_tokens=asked.max_new_tokens) != asked:
            raise PluginError(
                f"sampling_request: a hook changed the training play of {task.id} from {asked} to {sampling}; only "
                "max_new_tokens may change: the trainer computes log-probs of the run's own distribution"
            )
        chat = Chat(self.engine, self.adapter, sampling, seat, lambda history: self._encode(history, encoded))
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

    def _encode(self, history: list[Message], encoded: dict[Any, Encoded]) -> Encoded:
        """Members of a group say the same first: encode it once. Messages are compared by identity (media are big)."""
        key = tuple(map(id, history))
        if key not in encoded:
            encoded[key] = self.adapter.encode(history)
        return encoded[key]


class Rollout:
    """Starts groups as admission allows and keeps what was played, counted since the last ``take_counts``."""

    def __init__(
        self,
        run: Run,
        player: Player,
        bus: Bus,
        admission: Admission,
        feed: Feed,
        note: Callable[[str], None],
    ) -> None:
        self.note = note
        self.run, self.player, self.bus, self.admission, self.feed = run, player, bus, admission, feed
        self.engine = player.engine
        self.holder = bus.register("rollout")
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        """Plays that failed since this start, by what was wrong."""
        self._failed_in_a_row = 0
        self._at_work: dict[str, int] = {}  # members that still play, by group; see ``decided``
        self._plays: set[asyncio.Task[None]] = set()
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Play until cancelled. First what was in flight when the checkpoint was made, under the same keys."""
        try:
            self.engine.enter("train")
            for ticket in self.admission.in_flight():
                if not self.bus.holds(ticket.group):
                    await self.start(ticket)
            self.engine.leave("train")
            while True:
                await self._wait_open()
                self.engine.enter("train")
                while self.admission.open():
                    prompt = await self.feed.take(self.admission.next_position)
                    await self.start(self.admission.start(f"{prompt.task.id}@0"), prompt)
                self.engine.leave("train")
        finally:
            for play in self._plays:
                play.cancel()
            await asyncio.gather(*self._plays, return_exceptions=True)

    async def start(self, ticket: Ticket, prompt: Prompt | None = None) -> None:
        """Open the group on the bus, in the order of starting, and let its members play."""
        prompt = prompt or await self.feed.take(ticket.position)
        group = Group(ticket.group, ticket.serial, prompt.task, ticket.attempt)
        await self.bus.open_group(group.id, group.serial, prompt.task, self.holder)
        self._at_work[group.id] = self.run.config.group_size
        for _ in range(self.run.config.group_size):
            self.engine.enter("train")
        self.run.stack.hook.on_group_start(run=self.run, event=GroupEvent(group))
        play = asyncio.create_task(self._play(group, prompt), name=f"play {group.id}")
        self._plays.add(play)
        play.add_done_callback(self._ended)

    def decided(self, group: str, failure: str | None = None) -> None:
        """The group is scored, filtered or failed: nothing more will be sampled because of it. ``failure``: why it did.

        The last member to end its play stays entered until then: a filtered group is replaced by another one, which a
        deterministic engine must wait for.
        """
        if self._at_work.pop(group, None) is not None:
            self.engine.leave("train")
        self._failed_in_a_row = self._failed_in_a_row + 1 if failure else 0
        limit = max(20, 2 * (self.run.config.max_staleness + 1) * self.run.config.groups_per_step)
        if self._failed_in_a_row >= limit:  # a run in which every group fails must not go on for ever
            raise RelaxError(f"nothing of the last {limit} groups can be trained; the newest, {group}: {failure}")

    async def _wait_open(self) -> None:
        waiting = asyncio.ensure_future(self.admission.wait_open())
        await asyncio.wait({waiting, self._crashed}, return_when=asyncio.FIRST_COMPLETED)
        if self._crashed.done():
            waiting.cancel()
            self._crashed.result()
        await waiting

    def _ended(self, play: asyncio.Task[None]) -> None:
        self._plays.discard(play)
        if not play.cancelled() and (error := play.exception()) and not self._crashed.done():
            self._crashed.set_exception(error)

    async def _play(self, group: Group, prompt: Prompt) -> None:
        """Every member plays; the prompt's media are held until their rows hold them."""
        try:
            await self._members(group, {tuple(map(id, prompt.task.messages)): prompt.encoded})
        finally:
            self.player.adapter.media.release(prompt.keys)

    async def _members(self, group: Group, encoded: dict[Any, Encoded]) -> None:
        sampling = sampling_of(self.run.config.sampling)
        plays = []
        for member in range(self.run.config.group_size):
            seat = Seat(self.run.config.seed, group.task.id, group.attempt, member, (group.serial,))
            plays.append(asyncio.create_task(self._member(group, seat, sampling, encoded)))
        try:
            played = await asyncio.gather(*plays)
        finally:
            for play in plays:
                play.cancel()
        group.trajectories = [trajectory for trajectory, _ in played]
        try:
            await self._deliver(group)
        finally:
            for _, chat in played:
                chat.close()

    async def _member(
        self, group: Group, seat: Seat, sampling: Sampling, encoded: dict[Any, Encoded]
    ) -> tuple[Trajectory, Chat]:
        try:
            return await self.player.play(group.task, seat, sampling, None, encoded)
        finally:
            self._at_work[group.id] -= 1
            if self._at_work[group.id]:
                self.engine.leave("train")

    async def _deliver(self, group: Group) -> None:
        rows = rows_of(group)
        if not rows:
            await self.bus.evict(group.id)
            self.admission.end(group.id, Outcome.FAILED)
            self._count(group)
            error = next((t.error for t in group.trajectories if t.error), None)
            reason = f"{error.where}: {error.type}: {error.text}" if error else "no play sampled a token"
            self.decided(group.id, reason)
            return
        self.player.adapter.media.retain(media_keys(rows))
        await self.bus.put(rows, self.holder, group.id)
        await self.bus.close_group(group.id, len(rows), self.holder)
        self._count(group)  # now: a group that a checkpoint finds on the bus is not played again

    def _count(self, group: Group) -> None:
        """What was played, whether trained later or not. ``counts`` are part of a checkpoint."""
        for t in group.trajectories:
            self.counts["plays"] += 1
            self.counts["tokens"] += t.reply_tokens
            self.counts["rewrites"] += int(t.metrics.get("rewrites", 0))
            self.counts["truncated"] += t.stop is Stop.LENGTH
            if t.error:
                self.counts["errors"] += 1
                self._report(f"{t.error.where}: {t.error.type}: {t.error.text}")

    def _report(self, error: str) -> None:
        """Say each kind of error once, and count it; the first so many, since a text may differ every time."""
        if error not in self.errors and len(self.errors) < MOST_ERRORS:
            self.note(f"a play failed: {error}")
            self.errors[error] = 0
        self.errors[error if error in self.errors else OTHER_ERRORS] += 1

    def take_counts(self) -> Counter[str]:
        counts, self.counts = self.counts, Counter()
        return counts


def sampling_of(section: SamplingSection) -> Sampling:
    return Sampling(section.temperature, section.max_new_tokens, section.top_p, section.top_k)


def rows_of(group: Group) -> dict[str, Columns]:
    """The bus rows of a group's samples, by row id; failed plays and samples without sampled tokens give none."""
    rows: dict[str, Columns] = {}
    for trajectory in group.trajectories:
        if trajectory.error is None:
            for i, sample in enumerate(trajectory.samples):
                if sample.sampled:
                    rows[f"{group.id}/{trajectory.member}/{i}"] = _columns(sample, trajectory, group)
    return rows


def _columns(sample: Sample, trajectory: Trajectory, group: Group) -> Columns:
    import numpy as np

    return {
        "tokens": np.asarray(sample.ids, np.int32),
        "mask": np.asarray(sample.mask, np.int8),
        "logprobs": np.asarray(sample.logprobs, np.float32),
        "versions": np.asarray(sample.versions, np.int32),
        "positions": sample.positions,
        "media": sample.media,
        "trajectory": trajectory,
        "group": group,
    }


def media_keys(rows: Mapping[str, Columns]) -> list[str]:
    """One entry for each use of a medium's features by a row."""
    return [ref.key for columns in rows.values() for ref in columns["media"]]
