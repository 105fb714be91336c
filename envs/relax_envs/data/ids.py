"""Ids that occur twice, found without keeping them: by their hashes, eight bytes a row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class Duplicates:
    """``hashes``: those of the ids of several data sets, a row each. A row whose id an earlier one has is a duplicate.

    Two ids may by chance have one hash: whoever is told of a duplicate compares the ids themselves.
    """

    def __init__(self, hashes: Sequence[array[int]]) -> None:
        import numpy as np

        self._starts = np.cumsum([0, *map(len, hashes)])
        whole = np.concatenate([np.frombuffer(h, np.int64) if h else np.empty(0, np.int64) for h in hashes])
        order = np.argsort(whole, kind="stable")
        ordered = whole[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        first = np.searchsorted(ordered, ordered[again])  # the stable order puts the earliest row first
        by_row = np.argsort(order[again])
        self._rows, self._firsts = order[again][by_row], order[first][by_row]

    def first(self, data_set: int, row: int) -> tuple[int, int] | None:
        """The data set and row with the same id before this one."""
        import numpy as np

        wanted = int(self._starts[data_set]) + row
        place = int(np.searchsorted(self._rows, wanted))
        if place == len(self._rows) or int(self._rows[place]) != wanted:
            return None
        earlier = int(self._firsts[place])
        owner = int(np.searchsorted(self._starts, earlier, side="right")) - 1
        return owner, earlier - int(self._starts[owner])

    def of(self, data_set: int) -> list[int]:
        """The duplicates of one data set, ascending."""
        start, end = (int(s) for s in self._starts[data_set : data_set + 2])
        return [int(row) - start for row in self._rows if start <= row < end]
