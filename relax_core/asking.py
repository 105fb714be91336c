"""An engine as rewards ask it: questions in, answers out, in a pool and under keys of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.chat import Chat, Seat
from relax_core.config.schema import PlayLimits
from relax_core.errors import RelaxError
from relax_core.threads import in_thread
from relax_core.types import Encoded, Message, Sampling, Stop

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, ModelAdapter

LIMITS = PlayLimits(tokens=1 << 40)
"""What is too long for it the engine says by itself."""


@dataclass(frozen=True, slots=True)
class Question:
    """Something to ask. ``key`` and ``draw`` name its random draws. Make the key of the messages: equal keys are taken
    for equal messages, and what is asked again is answered the same, whoever asks it and in whatever order."""

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


_AGAIN_S = 0.05
"""Between two looks whether an engine serves."""

Asked = tuple[Question, Encoded | RelaxError]
"""A question with its tokens, or why it has none."""


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
        """The number of the weights that would answer now. Raises EngineError when the engine is dead.

        Where all engines are being started again, it is that of the first one that serves.
        """
        while (version := (await self.engine.health()).get("version")) is None:
            await asyncio.sleep(_AGAIN_S)
        return int(version)

    async def ask(
        self, questions: Sequence[Question], *, at_once: int, deadline: float
    ) -> list[Answer | BaseException]:
        """The answers, in order; an error in place of one that there is none of.

        ``at_once`` questions are asked at the same time; ``deadline``: seconds for each, from when it is.
        """
        prompts: dict[str, Encoded | RelaxError] = {}
        try:
            for question in questions:
                if question.key not in prompts:
                    prompts[question.key] = await self._encoded(question.messages)
            return await self._ask([(q, prompts[q.key]) for q in questions], at_once, deadline)
        finally:
            for prompt in prompts.values():
                self._release(prompt)

    # --- prompts ------------------------------------------------------------------------------------------------------

    async def _encoded(self, messages: tuple[Message, ...]) -> Encoded | RelaxError:
        """With its media retained, or why it cannot be; media are decoded in a thread."""
        if not any(m.media() for m in messages):
            return self._encode(messages)
        return await in_thread(lambda: self._encode(messages), undo=self._release)

    def _encode(self, messages: tuple[Message, ...]) -> Encoded | RelaxError:
        try:
            with self.adapter.media.holding():
                encoded = self.adapter.encode(messages)
                self.adapter.media.retain(ref.key for ref in encoded.media)
        except RelaxError as error:
            return error
        return encoded

    def _release(self, prompt: Encoded | RelaxError) -> None:
        if isinstance(prompt, Encoded):
            self.adapter.media.release(ref.key for ref in prompt.media)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _ask(self, asked: Sequence[Asked], at_once: int, deadline: float) -> list[Answer | BaseException]:
        if not self._deterministic:
            return await self._together(asked, asyncio.Semaphore(at_once), deadline)
        found: list[Answer | BaseException] = []
        async with self._one_call:
            for start in range(0, len(asked), at_once):
                part = asked[start : start + at_once]
                found += await self._together(part, asyncio.Semaphore(at_once), deadline)
        return found

    async def _together(
        self, asked: Sequence[Asked], places: asyncio.Semaphore, deadline: float
    ) -> list[Answer | BaseException]:
        """Everyone enters before anyone asks: then an engine that waits for all of them has all in one batch."""
        tasks = []
        for place, (question, prompt) in enumerate(asked):
            self.engine.enter("reward")
            task = asyncio.create_task(self._answer(question, prompt, place, places, deadline))
            task.add_done_callback(lambda _: self.engine.leave("reward"))
            tasks.append(task)
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(
        self, question: Question, prompt: Encoded | RelaxError, place: int, places: asyncio.Semaphore, deadline: float
    ) -> Answer:
        if isinstance(prompt, RelaxError):
            raise prompt
        seat = Seat(self._seed, question.key, 0, question.draw, (place,), "reward")
        async with places, asyncio.timeout(deadline):
            chat = Chat(self.engine, self.adapter, question.sampling, seat, lambda _: prompt, LIMITS)
            try:
                reply = await chat(*question.messages)
            finally:
                chat.close()
        versions = {version for sample in chat.samples for version in sample.versions} - {-1}
        return Answer(reply.text, reply.stop, versions.pop() if len(versions) == 1 else None)
