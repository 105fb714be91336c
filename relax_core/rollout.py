"""The rollout: admitted groups are opened on the bus in the order of their start, played, and their rows put there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_core.admission import Outcome
from relax_core.errors import RelaxError
from relax_core.hookspecs import GroupEvent
from relax_core.play_counts import PlayCounts
from relax_core.types import Group

if TYPE_CHECKING:
    from relax_core.admission import Admission, Ticket
    from relax_core.bus import Bus
    from relax_core.feed import Feed
    from relax_core.players import Played
    from relax_core.prompts import Prompt
    from relax_core.run import Run
    from relax_core.runtime import Roles


class Rollout:
    """Starts groups as admission allows, and counts what was played."""

    def __init__(
        self,
        run: Run,
        roles: Roles,
        admission: Admission,
        feed: Feed,
        note: Callable[[str], None],
    ) -> None:
        self.run, self.admission, self.feed = run, admission, feed
        self.engine, self.players, self.media = roles.engine, roles.players, roles.media
        self.bus: Bus = roles.bus
        self.holder = self.bus.register("rollout")
        self.plays = PlayCounts(run.config, note)
        self._failed_in_a_row = 0
        self._at_work: dict[str, int] = {}  # members that still play, by group; see ``decided``
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Play until cancelled. First what was in flight when the checkpoint was made, under the same keys."""
        try:
            self.engine.enter("train")
            for ticket in self.admission.in_flight():
                if not self.bus.holds(ticket.group):
                    await self.start(ticket)
            self.engine.leave("train")
            prompt: Prompt | None = None  # may be taken and not started: a publication began meanwhile
            while True:
                await self._wait_open()
                self.engine.enter("train")
                while self.admission.open():
                    prompt = prompt or await self.feed.take(self.admission.next_position)
                    if self.admission.open():
                        await self.start(self.admission.start(f"{prompt.task.id}@0"), prompt)
                        prompt = None
                self.engine.leave("train")
        finally:
            for play in self._tasks:
                play.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

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
        self._tasks.add(play)
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
        self._tasks.discard(play)
        if not play.cancelled() and (error := play.exception()) and not self._crashed.done():
            self._crashed.set_exception(error)

    async def _play(self, group: Group, prompt: Prompt) -> None:
        """Every member plays; the prompt's media are held until their rows hold them."""
        try:
            played = await self.players.group(group, prompt, self.holder, lambda: self._member_ended(group.id))
            await self._deliver(group.id, played)
        finally:
            self.media.release(prompt.keys)

    def _member_ended(self, group: str) -> None:
        self._at_work[group] -= 1
        if self._at_work[group]:
            self.engine.leave("train")

    async def _deliver(self, group: str, played: Played) -> None:
        if not played.rows:
            await self.bus.evict(group)
            self.admission.end(group, Outcome.FAILED)
            self.plays.add(played.plays)
            errors = (str(play.error) for play in played.plays if play.error)
            self.decided(group, next(errors, "no play sampled a token"))
            return
        closing = asyncio.create_task(self._close(group, played))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await closing

    async def _close(self, group: str, played: Played) -> None:
        await self.bus.close_group(group, played.rows, self.holder)
        self.plays.add(played.plays)

    async def settled(self) -> None:
        """Until every group that is closed on the bus is counted: a checkpoint that has a group on the bus has its
        plays among the counts, and is not going to play it again."""
        while self._closing:
            await asyncio.wait(self._closing)
