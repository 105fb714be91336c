"""Which rows of a micro-batch go to which rank, and how they get there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import Any, Protocol

from relax_core.interfaces import ModelAdapter, Row
from relax_core.plan import Planner

_SLACK = 1.1
"""Up to this much above the mean a rank may have, before a group is split for balance: a split computes its prompt
twice."""


def shares(rows: Sequence[Row], planner: Planner, size: int) -> list[list[Row]]:
    """Every row once, for each of ``size`` ranks its own, in their order; a pure function of its arguments.

    Whole trajectories. Groups, whose rows share a prompt, stay together while no rank has more than 1.1 of the mean
    cost; then the dearest are halved. No rank has more than the mean and one trajectory, or 1.1 of the mean.
    """
    items = [_Item(planner, list(members)) for _, members in groupby(rows, key=lambda row: row.group)]
    while True:
        given = _dealt(items, size)
        loads = [sum(item.cost for item in own) for own in given]
        mean = sum(loads) / size
        fullest = given[loads.index(max(loads))]
        splittable = [item for item in fullest if len(item.trajectories) > 1]
        if max(loads) <= _SLACK * mean or not splittable:
            break
        dearest = max(splittable, key=lambda item: item.cost)
        at = items.index(dearest)
        items[at : at + 1] = dearest.halves(planner)
    place = {id(row): i for i, row in enumerate(rows)}
    return [sorted((row for item in own for row in item.rows), key=lambda row: place[id(row)]) for own in given]


class _Item:
    """Rows that go to the same rank."""

    def __init__(self, planner: Planner, rows: list[Row]) -> None:
        self.rows = rows
        self.trajectories = [list(members) for _, members in groupby(rows, key=lambda row: row.trajectory)]
        self.cost = planner.cost(rows)

    def halves(self, planner: Planner) -> list[_Item]:
        """By trajectories."""
        middle = (len(self.trajectories) + 1) // 2
        parts = self.trajectories[:middle], self.trajectories[middle:]
        return [_Item(planner, [row for trajectory in part for row in trajectory]) for part in parts]


def _dealt(items: Sequence[_Item], size: int) -> list[list[_Item]]:
    """The dearest first, each to the rank with the least so far."""
    given: list[list[_Item]] = [[] for _ in range(size)]
    loads = [0] * size
    for item in sorted(items, key=lambda item: -item.cost):
        rank = loads.index(min(loads))
        given[rank].append(item)
        loads[rank] += item.cost
    return given


class Feed(Protocol):
    """Moves rows, and the media that they name, from rank 0 to the rank that computes them."""

    def send(self, shares: Sequence[Sequence[Row]]) -> Sequence[Any]:
        """On rank 0: for each rank a small picklable ticket. Rank 0 keeps its own rows, whatever its ticket."""

    def receive(self, ticket: Any) -> AbstractContextManager[Sequence[Row]]:
        """On another rank: its rows, whose media are in the model adapter's store while the block is open."""


class InlineFeed:
    """A ``Feed`` whose tickets are the rows and the features of their media themselves."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._media = adapter.media

    def send(self, shares: Sequence[Sequence[Row]]) -> Sequence[Any]:
        return [None, *(self._ticket(rows) for rows in shares[1:])]

    def _ticket(self, rows: Sequence[Row]) -> Any:
        whole = [Row(row.id, row.group, dict(row.columns)) for row in rows]  # some columns are read when asked for
        return whole, {key: dict(self._media.get(key)) for key in media_keys(rows)}

    @contextmanager
    def receive(self, ticket: Any) -> Iterator[Sequence[Row]]:
        rows, features = ticket
        with self._media.holding():
            for key, found in features.items():
                self._media.put(key, found)
            self._media.retain(list(features))
        try:
            yield rows
        finally:
            self._media.release(list(features))


def media_keys(rows: Sequence[Row]) -> list[str]:
    """The keys of the rows' media, each once."""
    return list(dict.fromkeys(ref.key for row in rows for ref in row.columns["media"]))
