"""An engine as rewards ask it: questions in, answers out, in a pool and under keys of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.chat import Chat, Seat
from relax_core.types import Message, Sampling, Stop

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, ModelAdapter


@dataclass(frozen=True, slots=True)
class Question:
    """Something to ask. ``key`` and ``draw`` name its random draws: make the key of what is asked, and what is asked
    again is answered the same, by whoever it is asked and in whatever order."""

    messages: tuple[Message, ...]
    sampling: Sampling
    key: str
    draw: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """``version``: the number of the weights that gave it; None where they changed in the middle of it."""

    text: str
    stop: Stop
    version: int | None = None


class Asker:
    """One for each engine and process, whoever asks there.

    Requests go to the pool ``reward``: no play waits for them, is batched with them, or draws their numbers. Where
    batches must not depend on timing (``deterministic``) the questions of one call are decoded together and those of
    other calls wait.
    """

    def __init__(self, engine: Engine, adapter: ModelAdapter, seed: int, deterministic: bool) -> None:
        self.engine, self.adapter = engine, adapter
        self._seed, self._deterministic = seed, deterministic
        self._one_call = asyncio.Lock()

    async def version(self) -> int:
        """The number of the weights that would answer now. Raises EngineError when the engine is dead."""
        return int((await self.engine.health())["version"])

    async def ask(
        self, questions: Sequence[Question], *, at_once: int, deadline: float
    ) -> list[Answer | BaseException]:
        """The answers, in order; an error in place of one that there is none of.

        ``at_once`` questions are asked at the same time; ``deadline``: seconds for each, from when it is.
        """
        if not self._deterministic:
            return await self._together(questions, asyncio.Semaphore(at_once), deadline)
        found: list[Answer | BaseException] = []
        async with self._one_call:
            for start in range(0, len(questions), at_once):
                part = questions[start : start + at_once]
                found += await self._together(part, asyncio.Semaphore(at_once), deadline)
        return found

    async def _together(
        self, questions: Sequence[Question], places: asyncio.Semaphore, deadline: float
    ) -> list[Answer | BaseException]:
        """Everyone enters before anyone asks: then an engine that waits for all of them has all in one batch."""
        tasks = []
        for place, question in enumerate(questions):
            self.engine.enter("reward")
            task = asyncio.create_task(self._answer(question, place, places, deadline))
            task.add_done_callback(lambda _: self.engine.leave("reward"))
            tasks.append(task)
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, question: Question, place: int, places: asyncio.Semaphore, deadline: float) -> Answer:
        seat = Seat(self._seed, question.key, 0, question.draw, (place,), "reward")
        async with places, asyncio.timeout(deadline):
            chat = Chat(self.engine, self.adapter, question.sampling, seat)
            try:
                reply = await chat(*question.messages)
            finally:
                chat.close()
        versions = {version for sample in chat.samples for version in sample.versions} - {-1}
        return Answer(reply.text, reply.stop, versions.pop() if len(versions) == 1 else None)
