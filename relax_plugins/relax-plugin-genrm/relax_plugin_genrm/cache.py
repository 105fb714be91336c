"""Judgements that are remembered, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from relax_plugin_genrm.reading import Reading


class Key(NamedTuple):
    """All that decides a judgement. ``version``: of the weights, for a judge whose weights change."""

    prompt: str
    draw: int
    version: int | None = None


class Cache:
    """Bounded. What was remembered is what would be said again: draws have keys of their own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._known: OrderedDict[Key, Reading] = OrderedDict()

    def get(self, key: Key) -> Reading | None:
        reading = self._known.get(key)
        if reading is not None:
            self._known.move_to_end(key)
        return reading

    def put(self, key: Key, reading: Reading) -> None:
        self._known[key] = reading
        self._known.move_to_end(key)
        while len(self._known) > self.size:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)
