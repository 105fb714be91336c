"""Book-keeping of the rows that are being decoded: one numpy record and one line of the token tables for each slot.

Active rows are slots 0..n-1. Everything is done for all rows at once; a row costs Python time only when it enters or
leaves.

Legend: S slots, M most new tokens of a row, N active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relax_core.interfaces import Completion
from relax_core.keys import draw_stream, uniforms
from relax_core.torch.queue import Waiting
from relax_core.types import Stop, Version

_RECORD = np.dtype(
    [
        ("length", np.int64),  # tokens whose keys and values are cached
        ("position", np.int64),  # of the token that is fed next, the newest one
        ("stream", np.uint64),
        ("drawn", np.uint64),  # tokens of this turn drawn so far, those of a continued prefix included
        ("new", np.int64),  # tokens drawn here
        ("limit", np.int64),  # of new
        ("end", np.int64),  # length when the limit is reached
        ("axes", np.bool_),  # whether positions have three axes
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
    ],
    align=True,
)


@dataclass(slots=True)
class Rows:
    """The active rows of one pool."""

    seed: int
    entries: list[Waiting] = field(default_factory=list)
    record_S: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, _RECORD))
    ids_SM: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    logprobs_SM: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    versions_SM: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def active(self) -> NDArray[np.void]:
        """The records of the active rows, as a view."""
        return self.record_S[: len(self.entries)]

    def add(self, entries: Sequence[Waiting]) -> None:
        """Give the next slots to requests whose prompts are cached."""
        first, count = len(self.entries), len(self.entries) + len(entries)
        self._grow(count, max(e.limit for e in entries))
        self.entries += entries
        for slot, e in enumerate(entries, first):
            request, sampling = e.request, e.request.sampling
            self.record_S[slot] = (
                e.prompt.length,
                e.prompt.position,
                draw_stream(self.seed, request.key),
                request.drawn,
                0,
                e.limit,
                e.end,
                e.prompt.segment.positions is not None,
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
            )

    def _grow(self, slots: int, width: int) -> None:
        old_slots, old_width = self.ids_SM.shape
        if slots <= old_slots and width <= old_width:
            return
        slots, width = max(slots, old_slots), max(width, old_width)
        records = np.zeros(slots, _RECORD)
        records[:old_slots] = self.record_S
        self.record_S = records
        for name in ("ids_SM", "logprobs_SM", "versions_SM"):
            old = getattr(self, name)
            new = np.zeros((slots, width), old.dtype)
            new[:old_slots, :old_width] = old
            setattr(self, name, new)

    def uniforms(self, first: int) -> NDArray[np.float64]:
        """The numbers from which slots ``first``.. draw their next tokens."""
        records = self.active[first:]
        return uniforms(records["stream"], records["drawn"])

    def append(self, first: int, ids: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """One drawn token for each of the slots ``first``.. ."""
        records = self.active[first:]
        slots, column = np.arange(first, len(self.entries)), records["new"]
        self.ids_SM[slots, column] = ids
        self.logprobs_SM[slots, column] = logprobs
        self.versions_SM[slots, column] = version
        records["new"] += 1
        records["drawn"] += np.uint64(1)

    def newest(self) -> NDArray[np.int64]:
        """The token that each row feeds next (N)."""
        newest_N: NDArray[np.int64] = self.ids_SM[np.arange(len(self.entries)), self.active["new"] - 1]
        return newest_N

    def completion(self, slot: int, stop: Stop, versions: Sequence[Version]) -> Completion:
        """What a row drew; ``versions`` by index."""
        n = int(self.record_S["new"][slot])
        return Completion(
            self.ids_SM[slot, :n].tolist(),
            self.logprobs_SM[slot, :n].tolist(),
            [versions[v] for v in self.versions_SM[slot, :n]],
            stop,
        )

    def remove(self, gone: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Drop rows and fill their slots from the end. Returns the slots (sources, targets) to copy in the cache."""
        count = len(self.entries) - int(gone.sum())
        sources, targets = count + np.flatnonzero(~gone[count:]), np.flatnonzero(gone[:count])
        for table in (self.record_S, self.ids_SM, self.logprobs_SM, self.versions_SM):
            table[targets] = table[sources]
        for source, target in zip(sources, targets, strict=True):
            self.entries[target] = self.entries[source]
        del self.entries[count:]
        return sources, targets
