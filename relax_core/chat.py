"""A conversation as the environment's author sees it, and the exact tokens behind it.

What the policy sampled is what is trained: ids, log-probs and versions are recorded as sampled and never made again
from text. What comes between two samplings is appended to the same sample with mask 0; only where a template rewrites
the past does a new sample start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relax_core.chat_state import Coming, Mark, Past, Record, advanced, append, checked
from relax_core.config.schema import PlayLimits
from relax_core.errors import TooManyTokens
from relax_core.interfaces import Request, Rewritten
from relax_core.keys import stream, uniform
from relax_core.models.tool_calls import without_calls
from relax_core.threads import in_thread
from relax_core.types import (
    CallError,
    Decoded,
    DrawKey,
    Encoded,
    MediaPart,
    Message,
    Sample,
    Sampling,
    Stop,
    Text,
    ToolCall,
    Turn,
    message,
)

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, ModelAdapter, Pool
    from relax_core.play_clock import PlayClock


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy answered."""

    text: str
    stop: Stop
    tokens: int
    calls: tuple[ToolCall | CallError, ...] = ()
    """The tools that it calls, as the model's format writes them; an error stands for a call that cannot be run."""
    content: str = ""
    """The text without the calls that can be run."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Who is playing: the play's key (seed, task, attempt, member), its place in the queue, and its pool."""

    seed: int
    task: str
    attempt: int
    member: int
    order: tuple[int, ...]
    pool: Pool = "train"


class PlayOver(BaseException):
    """A limit of the play is reached: it ends here, and is trained. No error: ``except Exception`` lets it pass."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(f"the play is over: {stop}")
        self.stop = stop


class Chat:
    """``reply = await chat("text", message(...))``: say something, get the policy's next reply."""

    def __init__(
        self,
        engine: Engine,
        adapter: ModelAdapter,
        sampling: Sampling,
        seat: Seat,
        encode: Callable[[list[Message]], Encoded] | None = None,
        limits: PlayLimits | None = None,
        clock: PlayClock | None = None,
    ) -> None:
        self._engine, self._adapter, self.sampling, self._seat = engine, adapter, sampling, seat
        self._encode = encode or adapter.encode
        self._limits, self._clock = limits or PlayLimits(), clock
        self._record = Record()
        self._sample: Sample | None = None
        self._path: list[Past] = []
        self._asking = False
        self.history: list[Message] = []

    @property
    def turns(self) -> list[Turn]:
        """Of the whole play, in the order in which they ended."""
        return self._record.turns

    @property
    def samples(self) -> list[Sample]:
        """Of the whole play."""
        return self._record.samples

    @property
    def rewrites(self) -> list[str]:
        """Why a new sample had to be started, each time it was."""
        return self._record.rewrites

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers that the environment notes of this play, by a name of its own: they are logged, and averaged."""
        return self._record.metrics

    @property
    def replies(self) -> int:
        """Of this conversation, the common past of a branch included."""
        return len(self._path)

    @property
    def tokens(self) -> int:
        """Of this conversation up to its newest reply, as the engine would read them."""
        return self._path[-1].tokens if self._path else 0

    @property
    def answer(self) -> str | None:
        """What the play ends with, where that is not its last reply: the environment sets it, and rewards read it."""
        return self._record.answer

    @answer.setter
    def answer(self, text: str) -> None:
        self._record.answer = text

    def dump(self, medium: MediaPart) -> tuple[str, bytes]:
        """A medium as a file, suffix and bytes; it may take long. Raises DataError for one that cannot be read."""
        return self._adapter.media.dump(medium)

    async def __call__(self, *content: Message | str, max_new_tokens: int | None = None) -> Reply:
        """Append messages (text is a user's) and sample the next reply, of at most ``max_new_tokens`` if given.

        Raises DataError for media or templates that do not fit (TooManyTokens for what no sample can hold), EngineError
        when the engine cannot serve it, and PlayOver where a limit of the play is reached: then all is as it was.
        """
        if self._asking:
            raise RuntimeError("chat: a reply is still on its way; chat.branch() is for conversations side by side")
        self._asking = True
        before = Mark.of(self._sample, len(self.history))
        try:
            new = [message("user", c) if isinstance(c, str) else c for c in content]
            number = self._take_number()
            sample = await self._say(new)
            ids, stop = await self._draw(sample, self._limited(sample, max_new_tokens), number)
            return self._replied(new, sample, ids, stop)
        except BaseException:
            self._roll_back(before)
            raise
        finally:
            self._asking = False

    def branch(self, turns: int) -> Chat:
        """Another conversation, which goes on behind the first ``turns`` replies of this one; 0: from nothing.

        It is part of the same play. Tokens of the common past are trained once, in the sample in which they were drawn.
        Raises ValueError when there were not as many replies.
        """
        if not 0 <= turns <= len(self._path):
            raise ValueError(f"chat.branch: {turns} turns are asked for, there were {len(self._path)}")
        other = Chat(self._engine, self._adapter, self.sampling, self._seat, self._encode, self._limits, self._clock)
        other._record, other._path = self._record, self._path[:turns]
        if turns:
            other.history = self.history[: self._path[turns - 1].messages]
        return other

    def count_calls(self, n: int) -> None:
        """Tools are about to be called. Raises PlayOver when these are more than the play may call."""
        most = self._limits.tool_calls
        if most is not None and self._record.calls + n > most:
            raise PlayOver(Stop.TOOL_CALLS)
        self._record.calls += n

    async def decoded(self, part: MediaPart) -> Decoded:
        """The content of a medium, for tools that look into it: the very arrays that the model's features are made of.

        What is not decoded yet is decoded in a thread. Raises DataError for what cannot be read.
        """
        if isinstance(part.source, Decoded):
            return part.source
        return await asyncio.to_thread(self._adapter.media.decode, part)

    def random(self, *names: str | int) -> float:
        """A number in [0, 1) of this play's own, the same whenever it is played again: give each draw another name."""
        seat = self._seat
        return uniform(stream(seat.seed, "play", seat.task, seat.attempt, seat.member, *names), 0)

    # --- limits -------------------------------------------------------------------------------------------------------

    def _take_number(self) -> int:
        """Which of the play's replies comes now, counted as they are asked for."""
        self._check_open()
        most = self._limits.turns
        if most is not None and self._record.asked >= most:
            raise PlayOver(Stop.TURNS)
        self._record.asked += 1
        return self._record.asked - 1

    def _check_open(self) -> None:
        if self._record.over:
            raise RuntimeError("chat: the play is over; what goes on after it must be awaited in it")

    def _check_room(self, past: int, new: int) -> None:
        """Before anything is appended to a sample of ``past`` tokens."""
        most = self._limits.tokens
        if new > most:
            raise TooManyTokens(f"{new:,} tokens are said at once, and limits.tokens allows {most:,}: say less")
        if past + new >= most:
            raise PlayOver(Stop.TOKENS)

    def _limited(self, sample: Sample, max_new_tokens: int | None) -> Sampling:
        limit = self.sampling.max_new_tokens
        most = min(limit, max_new_tokens or limit, self._limits.tokens - len(sample.ids))
        return replace(self.sampling, max_new_tokens=most)

    # --- what is said -------------------------------------------------------------------------------------------------

    async def _say(self, new: list[Message]) -> Sample:
        """The sample with the tokens up to the next sampling."""
        sample = self._sample
        if sample is None and self._path:
            sample = self._path[-1].begun()
        coming = await self._encoded(sample, new)
        self._record.kept += coming.keys
        if coming.begins:
            sample = Sample([], [], [], [])
        assert sample is not None
        self._check_room(len(sample.ids), len(coming.encoded.ids))
        if sample is not self._sample:
            self.samples.append(sample)
            self._sample = sample
        if coming.rewritten is not None:
            self.rewrites.append(coming.rewritten)
        append(sample, coming.encoded)
        self.history += new
        return sample

    async def _encoded(self, sample: Sample | None, new: list[Message]) -> Coming:
        """Media of tools and environments are decoded in a thread: other plays go on meanwhile. A task's are decoded
        before it is played."""
        if sample is None or not any(m.media() for m in new):
            return self._encode_now(sample, new)
        return await in_thread(
            lambda: self._encode_now(sample, new), undo=lambda coming: self._adapter.media.release(coming.keys)
        )

    def _encode_now(self, sample: Sample | None, new: list[Message]) -> Coming:
        """What comes behind ``sample``, or the whole conversation for a new one. Its media are retained."""
        with self._adapter.media.holding():
            coming = self._coming(sample, new)
            self._adapter.media.retain(coming.keys)
        return coming

    def _coming(self, sample: Sample | None, new: list[Message]) -> Coming:
        if sample is None:
            return Coming(self._encode([*self.history, *new]), begins=True)
        result = self._adapter.extend(self.history, Encoded(sample.ids, sample.media, sample.positions), new)
        if isinstance(result, Rewritten):
            return Coming(self._encode([*self.history, *new]), begins=True, rewritten=result.reason)
        return Coming(result.new)

    def _roll_back(self, mark: Mark) -> None:
        """As it was before something was said to which there is no reply."""
        if self._sample is not None and self._sample is not mark.sample:
            self.samples[:] = [s for s in self.samples if s is not self._sample]
        self._sample = mark.sample
        mark.restore()
        del self.history[mark.messages :]

    # --- what is drawn ------------------------------------------------------------------------------------------------

    async def _draw(self, sample: Sample, sampling: Sampling, number: int) -> tuple[list[int], Stop]:
        """Draw one turn; an aborted one goes on from its prefix under the same key, whatever the weights are then."""
        start = len(sample.ids)
        key = DrawKey(self._seat.task, self._seat.attempt, self._seat.member, number)
        request = Request(
            id="/".join(map(str, (*key, self._seat.pool))),
            key=key,
            prompt=Encoded(list(sample.ids), sample.media, sample.positions),
            sampling=sampling,
            order=(*self._seat.order, self._seat.member, number),
            pool=self._seat.pool,
        )
        while True:
            with self._clock.stopped() if self._clock else nullcontext():
                done = checked(await self._engine.generate(request), request)
            self._check_open()
            n = len(done.ids)
            sample.ids += done.ids
            sample.mask += [1] * n
            sample.logprobs += done.logprobs
            sample.versions += [v.number for v in done.versions]
            sample.positions = advanced(sample.positions, n)
            if done.stop is not Stop.ABORT:
                return sample.ids[start:], done.stop
            prompt = Encoded(list(sample.ids), sample.media, sample.positions)
            request = replace(request, prompt=prompt, drawn=request.drawn + n)

    def _replied(self, new: list[Message], sample: Sample, ids: list[int], stop: Stop) -> Reply:
        text = self._adapter.decode(ids)
        reply = Message("assistant", (Text(text),))
        if stop is Stop.LENGTH and len(sample.ids) >= self._limits.tokens:
            stop = Stop.TOKENS
        self.history.append(reply)
        after = self._path[-1].turn if self._path else -1
        self._path.append(Past(len(self.turns), len(self.history), sample, len(sample.ids)))
        self.turns.append(Turn(tuple(new), reply, stop, len(ids), after))
        calls = self._adapter.tool_calls.find(text)
        return Reply(text, stop, len(ids), tuple(found.call for found in calls), without_calls(text, calls))

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The play is over: nothing is said or drawn in any of its conversations any more."""
        self._record.over = True

    def close(self) -> None:
        """Give the media back; rows that were made hold their own references."""
        self.end()
        kept, self._record.kept = self._record.kept, []
        if kept:
            self._adapter.media.release(kept)
