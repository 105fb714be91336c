"""Where the conversations of a play stand: what they share, samples that grow, end and begin, answers of engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_core.errors import EngineError
from relax_core.types import Encoded, MediaRef, Sample, Stop, Turn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.interfaces import Completion, Request


@dataclass(slots=True)
class Record:
    """What the conversations of one play share."""

    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rewrites: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    asked: int = 0
    """Replies that were asked for."""
    calls: int = 0
    kept: list[str] = field(default_factory=list)
    """Media features that are held, once for each mention."""
    answer: str | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """Where a conversation was when a turn ended."""

    turn: int
    messages: int
    sample: Sample
    tokens: int

    def begun(self) -> Sample:
        """A sample that goes on from there: its tokens are context, since they are trained where they were drawn."""
        n = self.tokens
        return Sample(self.sample.ids[:n], [0] * n, [0.0] * n, [-1] * n, *first(self.sample, n))


@dataclass(frozen=True, slots=True)
class Coming:
    """Tokens for the sample: behind what is there, or where it ``begins`` anew, all of the conversation."""

    encoded: Encoded
    begins: bool = False
    rewritten: str | None = None
    """Why the former sample cannot go on."""

    @property
    def keys(self) -> list[str]:
        return [ref.key for ref in self.encoded.media]


@dataclass(frozen=True, slots=True)
class Mark:
    """A conversation before something is said."""

    sample: Sample | None
    tokens: int
    messages: int

    @classmethod
    def of(cls, sample: Sample | None, messages: int) -> Mark:
        return cls(sample, 0 if sample is None else len(sample.ids), messages)

    def restore(self) -> None:
        sample, n = self.sample, self.tokens
        if sample is not None:
            sample.media, sample.positions = first(sample, n)
            for column in (sample.ids, sample.mask, sample.logprobs, sample.versions):
                del column[n:]


def first(sample: Sample, n: int) -> tuple[tuple[MediaRef, ...], NDArray[np.int32] | None]:
    """Media and positions of a sample's first ``n`` tokens."""
    media = tuple(ref for ref in sample.media if ref.start < n)
    return media, None if sample.positions is None else sample.positions[:, :n]


def append(sample: Sample, observed: Encoded) -> None:
    n = len(observed.ids)
    sample.ids += observed.ids
    sample.mask += [0] * n
    sample.logprobs += [0.0] * n
    sample.versions += [-1] * n
    sample.media += observed.media
    sample.positions = _joined(sample.positions, observed.positions)


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


def checked(done: Completion, request: Request) -> Completion:
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
