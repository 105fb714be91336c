"""Requests that wait for a slot: whether one can be served at all, who is next, and which prompts are read together."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from relax_core.errors import EngineError
from relax_core.interfaces import Request, Segment


@dataclass(eq=False, slots=True)
class Prompt:
    """What requests begin with; those with equal keys share one. ``hidden`` (H,) is there once it was read."""

    key: tuple[object, ...]
    segment: Segment
    position: int
    """Of the first token drawn after it."""
    hidden: Tensor | None = None
    version: int = -1
    """Index of the version of the weights that read it."""

    @property
    def length(self) -> int:
        return len(self.segment.ids)

    @classmethod
    def of(cls, request: Request) -> Prompt:
        encoded = request.prompt
        positions = encoded.positions
        media = tuple((m.kind, m.key, m.start, m.length) for m in encoded.media)
        key = (np.asarray(encoded.ids, np.int64).tobytes(), media, None if positions is None else positions.tobytes())
        after = len(encoded.ids) if positions is None else int(positions[:, -1].max()) + 1
        return cls(key, Segment(encoded.ids, encoded.media, positions), after)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that has no slot yet. ``ticket`` counts requests as they came."""

    ticket: int
    request: Request
    prompt: Prompt

    @property
    def limit(self) -> int:
        """New tokens that may still be drawn in its turn."""
        return self.request.sampling.max_new_tokens - self.request.drawn

    @property
    def end(self) -> int:
        """Cached tokens at most, at its end."""
        return self.prompt.length + self.limit


@dataclass(slots=True)
class Queue:
    """Waiting requests by ``order``, then as they came; none overtakes another."""

    items: list[tuple[tuple[int, ...], int, Waiting]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def put(self, entry: Waiting) -> None:
        insort(self.items, (entry.request.order, entry.ticket, entry))

    def drop(self, ticket: int) -> None:
        self.items = [item for item in self.items if item[1] != ticket]

    def take(self, max_rows: int, rows: int, end: int, max_cache_tokens: int | None) -> list[Waiting]:
        """Those that fit beside so many running ``rows``, of which the longest may reach ``end`` tokens."""
        taken = 0
        for _, _, entry in self.items[: max_rows - rows]:
            end = max(end, entry.end)
            if max_cache_tokens is not None and (rows + taken + 1) * end > max_cache_tokens:
                break
            taken += 1
        entries = [entry for _, _, entry in self.items[:taken]]
        del self.items[:taken]
        return entries


def check_request(request: Request, max_length: int | None, max_cache_tokens: int | None) -> None:
    """Raises EngineError for a request that can never be served.

    ``sampling.max_new_tokens`` limits the whole turn, a continued prefix included.
    """
    sampling, prompt = request.sampling, len(request.prompt.ids)
    where = f"engine: request {request.id!r}"
    if not prompt:
        raise EngineError(f"{where}: its prompt is empty; give it at least one token")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise EngineError(f"{where}: {sampling}: needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0")
    if request.pool == "train" and (sampling.top_p < 1 or sampling.top_k):
        raise EngineError(f"{where}: top_p and top_k are for evaluations; training samples the whole distribution")
    if request.drawn >= sampling.max_new_tokens:
        raise EngineError(f"{where}: {request.drawn} tokens drawn, max_new_tokens is {sampling.max_new_tokens}")
    end = prompt + sampling.max_new_tokens - request.drawn
    for name, limit in (("model's positions", max_length), ("max_cache_tokens", max_cache_tokens)):
        if limit is not None and end > limit:
            raise EngineError(
                f"{where}: {prompt} tokens of prompt and {end - prompt} to come exceed the {limit} of the {name}; "
                "shorten the prompt or lower max_new_tokens"
            )


def batches(groups: list[list[Waiting]], max_prefill_tokens: int) -> list[list[list[Waiting]]]:
    """Cut groups of equal prompts into forwards of at most ``max_prefill_tokens``, padding included."""
    found: list[list[list[Waiting]]] = []
    for group in sorted(groups, key=lambda g: g[0].prompt.length):  # alike lengths together: little padding
        width = group[0].prompt.length
        if not found or width * (len(found[-1]) + 1) > max_prefill_tokens:
            found.append([])
        found[-1].append(group)
    return found
