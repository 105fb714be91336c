"""Plays and grading in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from relax_core.asking import Asker
from relax_core.players import Memo, Played, Player, Players
from relax_core.router import Router
from relax_core.run import build_environments
from relax_core.scoring import Graders, Scorer, asks_policy
from relax_core.types import Task
from relax_plugin_ray.engine import RayEngine
from relax_plugin_ray.worker import adapter_of, run_of

if TYPE_CHECKING:
    from relax_core.bus import Holder
    from relax_core.chat import Seat
    from relax_core.interfaces import Engine
    from relax_core.prompts import Prompt
    from relax_core.types import Group, Sampling, Trajectory
    from relax_plugin_ray.bus import RayBus
    from relax_plugin_ray.media import Shared, SharedMedia
    from relax_plugin_ray.pool import Pool

AT_ONCE = 100_000
"""Calls that an actor runs at the same time; each play waits in one."""
NO_TASK = Task("", ())
_ENDED = None
"""What a playing actor sends when a member has ended."""


# --- plays ------------------------------------------------------------------------------------------------------------


class Visitor:
    """An actor that asks engines itself. ``engines``: their actors, None for those that are not made yet."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines

    async def connect(self, media: SharedMedia) -> Router:
        """The engines as one. ``media``: from which requests take features."""
        router = Router([RayEngine.connect(partial(self._find, i), media) for i in range(len(self._engines))])
        await router.start()
        return router

    async def engine_is(self, index: int, actor: Any) -> None:
        """An engine was made, or made anew."""
        self._engines[index] = actor

    def _find(self, index: int) -> Any:
        if self._engines[index] is None:
            raise ValueError(f"engine {index} is not made yet")
        return self._engines[index]


class EnvironmentActor(Visitor):
    """Plays tasks with engines that it visits."""

    def __init__(self, resolved: Mapping[str, Any], role: str, engines: list[Any], bus: RayBus) -> None:
        super().__init__(engines)
        self._role, self._resolved, self._bus = role, resolved, bus
        self._player: Player | None = None
        self._media: SharedMedia | None = None

    def __repr__(self) -> str:
        return self._role

    async def ready(self) -> None:
        """Build everything, and connect to the engines."""
        run = run_of(self._resolved, self._role)
        adapter, media = adapter_of(run)
        self._bus.media = self._media = media
        self._player = Player(run, await self.connect(media), adapter, build_environments(run), self._bus)

    async def group(
        self, empty: Group, prompt: Prompt, shared: Mapping[str, Shared], holder: Holder, announce: bool
    ) -> AsyncIterator[Any]:
        """Play a group, which came without its task, and put its rows on the bus.

        Gives ``_ENDED`` for each member's end, if these are to be announced, and ``Played`` at the end.
        """
        import asyncio

        assert self._player is not None and self._media is not None
        group = replace(empty, task=prompt.task)
        self._media.know(shared)
        self._media.retain(prompt.keys)
        ends: asyncio.Queue[Any] = asyncio.Queue()
        told = (lambda: ends.put_nowait(_ENDED)) if announce else (lambda: None)
        playing = asyncio.ensure_future(self._player.group(group, prompt, holder, told))
        playing.add_done_callback(ends.put_nowait)
        try:
            while await ends.get() is _ENDED:
                yield _ENDED
            yield playing.result()
        finally:
            playing.cancel()
            self._media.release(prompt.keys)

    async def single(self, task: Task, seat: Seat, sampling: Sampling, evaluation: str | None) -> Trajectory:
        assert self._player is not None
        return await self._player.single(task, seat, sampling, evaluation, {})

    async def close(self) -> None:
        if self._player is not None:
            for environment in self._player.environments.values():
                await environment.close()


class RayPlayers(Players):
    """Passes plays on to environment actors.

    ``announce``: deterministic engines must hear at once when a member has ended. Rows carry their media themselves
    (see ``RayBus``), so nothing is held here.
    """

    def __init__(self, pool: Pool, engine: Engine, bus: RayBus, media: SharedMedia, announce: bool) -> None:
        self.pool, self.engine, self.bus, self.media, self.announce = pool, engine, bus, media, announce

    async def group(self, group: Group, prompt: Prompt, holder: Holder, ended: Callable[[], None]) -> Played:
        shared = self.media.share(prompt.keys)
        empty = replace(group, task=NO_TASK)  # it travels once, with its prompt, and is one object there as here
        members, begun = 0, False
        await self._settled()

        async def play(actor: Any) -> Played:
            nonlocal members, begun
            if begun:  # an actor died; what it may have put is of a play that nobody knows the end of
                await self.bus.evict(group.id)
                await self.bus.open_group(group.id, group.serial, prompt.task, holder)
            begun, told = True, 0
            stream = actor.group.options(num_returns="streaming").remote(empty, prompt, shared, holder, self.announce)
            async for reference in stream:
                item = await reference
                if item is not _ENDED:
                    return item  # type: ignore[no-any-return]
                told += 1
                if told > members:
                    members = told
                    ended()
            raise RuntimeError(f"group {group.id}: its actor gave no result")

        played = await self.pool.call(play)
        size = len(played.plays)
        for _ in range(size - members):
            ended()
        return played

    async def single(
        self, task: Task, seat: Seat, sampling: Sampling, evaluation: str | None, memo: Memo
    ) -> Trajectory:
        await self._settled()

        async def play(actor: Any) -> Trajectory:
            return await actor.single.remote(task, seat, sampling, evaluation)  # type: ignore[no-any-return]

        found = await self.pool.call(play)
        return replace(found, task=task)  # the very task, whose media need not be there twice

    async def close(self) -> None:
        await self.pool.each("close")

    async def _settled(self) -> None:
        """A deterministic engine must know of a party before that party's first request comes, from elsewhere."""
        if self.announce:
            await self.engine.settled()


# --- grading ----------------------------------------------------------------------------------------------------------


class GraderActor(Visitor):
    """Scores groups with rewards of its own, which may ask the run's engines. ``deterministic``: see ``Asker``."""

    def __init__(self, resolved: Mapping[str, Any], role: str, engines: list[Any], deterministic: bool) -> None:
        super().__init__(engines)
        self._role, self._resolved, self._deterministic = role, resolved, deterministic
        self._scorer: Scorer | None = None

    def __repr__(self) -> str:
        return self._role

    async def ready(self) -> None:
        run = run_of(self._resolved, self._role)
        policy: Asker | None = None
        if asks_policy(run.config, run.stack):
            adapter, media = adapter_of(run)
            policy = Asker(await self.connect(media), adapter, run.config.seed, self._deterministic)
        self._scorer = Scorer.of(run)
        await self._scorer.begin(run, policy)

    async def score(self, group: Group) -> tuple[list[tuple[Any, ...]], str]:
        """Of each trajectory what scoring filled in; and the failures until now, in words."""
        assert self._scorer is not None
        await self._scorer.score(group)
        filled = [(t.rewards, t.reward, t.raw_reward, t.metrics) for t in group.trajectories]
        return filled, self._scorer.failures_in_words()

    async def close(self) -> None:
        if self._scorer is not None:
            await self._scorer.close()


class RayGraders(Graders):
    """Passes groups on to grader actors. A group whose grader dies is graded again."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._failures = ""

    async def score(self, group: Group) -> None:
        async def grade(actor: Any) -> tuple[list[tuple[Any, ...]], str]:
            return await actor.score.remote(group)  # type: ignore[no-any-return]

        filled, self._failures = await self.pool.call(grade)
        for t, (rewards, reward, raw_reward, metrics) in zip(group.trajectories, filled, strict=True):
            t.rewards, t.reward, t.raw_reward, t.metrics = rewards, reward, raw_reward, metrics

    def failures_in_words(self) -> str:
        return self._failures

    async def close(self) -> None:
        await self.pool.each("close")


def actor_of(kind: type, **options: Any) -> Callable[..., Any]:
    """Makes actors of a class that run many calls at once; Ray never restarts them: who made them does."""
    remote: Any = ray.remote(kind).options(max_restarts=0, max_concurrency=AT_ONCE, **options)
    make: Callable[..., Any] = remote.remote
    return make
