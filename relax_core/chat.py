"""A conversation as the environment's author sees it, and the exact tokens behind it.

What the policy sampled is what is trained: ids, log-probs and versions are recorded as sampled and never made again
from text. What comes between two samplings is appended to the same sample with mask 0; only where a template rewrites
the past does a new sample start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Request, Rewritten
from relax_core.keys import stream, uniform
from relax_core.types import (
    DrawKey,
    Encoded,
    Message,
    Sample,
    Sampling,
    Stop,
    Text,
    Turn,
    message,
)

if TYPE_CHECKING:
    from typing import Literal

    import numpy as np
    from numpy.typing import NDArray

    from relax_core.interfaces import Engine, ModelAdapter


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy answered."""

    text: str
    stop: Stop
    tokens: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Who is playing: the play's key (seed, task, attempt, member), its place in the queue, and its pool."""

    seed: int
    task: str
    attempt: int
    member: int
    order: tuple[int, ...]
    pool: Literal["train", "eval"] = "train"


class Chat:
    """``reply = await chat("text", message(...))``: say something, get the policy's next reply."""

    def __init__(
        self,
        engine: Engine,
        adapter: ModelAdapter,
        sampling: Sampling,
        seat: Seat,
        encode: Callable[[list[Message]], Encoded] | None = None,
    ) -> None:
        self._engine, self._adapter, self._sampling, self._seat = engine, adapter, sampling, seat
        self._encode = encode or adapter.encode
        self._kept: list[str] = []
        self.history: list[Message] = []
        self.turns: list[Turn] = []
        self.samples: list[Sample] = []
        self.rewrites: list[str] = []
        """Why a new sample had to be started, each time it was."""

    async def __call__(self, *content: Message | str, max_new_tokens: int | None = None) -> Reply:
        """Append messages (text is a user's) and sample the next reply, of at most ``max_new_tokens`` if given.

        Raises DataError for media or templates that do not fit, EngineError when the engine cannot serve it.
        """
        new = [message("user", c) if isinstance(c, str) else c for c in content]
        self._say(new)
        sample = self.samples[-1]
        ids, stop = await self._sample(sample, self._limited(max_new_tokens))
        text = self._adapter.decode(ids)
        reply = Message("assistant", (Text(text),))
        self.history.append(reply)
        self.turns.append(Turn(tuple(new), reply, stop, len(ids)))
        return Reply(text, stop, len(ids))

    def random(self, *names: str | int) -> float:
        """A number in [0, 1) of this play's own, the same whenever it is played again: give each draw another name."""
        seat = self._seat
        return uniform(stream(seat.seed, "play", seat.task, seat.attempt, seat.member, *names), 0)

    def _limited(self, max_new_tokens: int | None) -> Sampling:
        limit = self._sampling.max_new_tokens
        return replace(self._sampling, max_new_tokens=min(limit, max_new_tokens or limit))

    def _say(self, new: list[Message]) -> None:
        """Bring the tokens up to the next sampling. What is refused leaves everything as it was."""
        with self._adapter.media.holding():
            result = self._extended(new)
            if isinstance(result, Encoded):
                self._append(self.samples[-1], result)
            else:
                first = self._encode([*self.history, *new])
                self.rewrites += [result] if result else []
                self.samples.append(Sample([], [], [], []))
                self._append(self.samples[-1], first)
        self.history += new

    def _extended(self, new: list[Message]) -> Encoded | str | None:
        """What goes behind the newest sample; why it cannot go on; None where there is none yet."""
        if not self.samples:
            return None
        last = self.samples[-1]
        result = self._adapter.extend(self.history, Encoded(last.ids, last.media, last.positions), new)
        return result.reason if isinstance(result, Rewritten) else result.new

    def _append(self, sample: Sample, observed: Encoded) -> None:
        n = len(observed.ids)
        sample.ids += observed.ids
        sample.mask += [0] * n
        sample.logprobs += [0.0] * n
        sample.versions += [-1] * n
        sample.media += observed.media
        sample.positions = _joined(sample.positions, observed.positions)
        self.keep([ref.key for ref in observed.media])

    async def _sample(self, sample: Sample, sampling: Sampling) -> tuple[list[int], Stop]:
        """Draw one turn; an aborted one goes on from its prefix under the same key, whatever the weights are then."""
        start = len(sample.ids)
        key = DrawKey(self._seat.task, self._seat.attempt, self._seat.member, len(self.turns))
        request = Request(
            id="/".join(map(str, (*key, self._seat.pool))),
            key=key,
            prompt=Encoded(list(sample.ids), sample.media, sample.positions),
            sampling=sampling,
            order=(*self._seat.order, self._seat.member, len(self.turns)),
            pool=self._seat.pool,
        )
        while True:
            done = _checked(await self._engine.generate(request), request)
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

    def keep(self, keys: Collection[str]) -> None:
        """Media features stay in the store while this play may need them."""
        if keys:
            self._adapter.media.retain(keys)
            self._kept += keys

    def close(self) -> None:
        """Give the media back; rows that were made hold their own references."""
        if self._kept:
            self._adapter.media.release(self._kept)
            self._kept = []


def _checked(done: Completion, request: Request) -> Completion:
    """Raises EngineError unless there are tokens, each with a finite log-prob and a version."""
    parts: dict[str, Sequence[object] | None] = {"ids": done.ids, "log-probs": done.logprobs, "versions": done.versions}
    counts = {name: -1 if values is None else len(values) for name, values in parts.items()}
    wrong = len(set(counts.values())) > 1 or -1 in counts.values()
    wrong = wrong or any(value is None for values in parts.values() for value in values or ())
    wrong = wrong or not all(map(math.isfinite, done.logprobs))
    if wrong or not (done.ids or request.drawn or done.stop is Stop.ABORT):
        found = ", ".join(f"{'no' if count < 0 else count} {name}" for name, count in counts.items())
        raise EngineError(
            f"engine: its answer to {request.id} has {found}; each sampled token needs an id, a finite log-prob and a "
            "version, and an answer that is no prefix at least one: let the engine return them"
        )
    return done


def _joined(past: NDArray[np.int32] | None, new: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    import numpy as np

    if new is None or past is None:
        return new if past is None else past
    return np.concatenate([past, new], axis=1)


def advanced(positions: NDArray[np.int32] | None, n: int) -> NDArray[np.int32] | None:
    """Sampled tokens are text: one step on all three axes, from the last token's position on."""
    import numpy as np

    if positions is None:
        return None
    start = int(positions[:, -1].max()) + 1
    steps = np.arange(start, start + n, dtype=np.int32)
    return np.concatenate([positions, np.broadcast_to(steps, (3, n))], axis=1)
