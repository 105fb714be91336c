"""Cuts the rows of a step into micro-batches of a bounded number of tokens, and these into optimizer updates."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Protocol

from relax_core.interfaces import Cut, Row


class Planner(Protocol):
    """What a trainer says of the micro-batches it likes."""

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch, as ``cost`` counts them."""

    def cost(self, rows: Sequence[Row]) -> int:
        """Tokens that a micro-batch of these rows computes, padding included."""


async def plan(
    groups: AsyncIterable[Sequence[Row]], planner: Planner, updates: int, epochs: int, groups_per_step: int
) -> AsyncIterator[Cut]:
    """The cuts of one step: a function of the groups and their order, never of timing.

    Groups are split in order into ``updates / epochs`` mini-batches of equally many, which are repeated for each epoch.
    In the first epoch a cut is given as soon as it is full. The last cut of an update has ``last`` set, and may be
    empty. A group is split only if it alone exceeds the budget, and a trajectory never is.
    """
    mini_batches = updates // epochs
    bounds = [groups_per_step * i // mini_batches for i in range(mini_batches + 1)]
    again: list[Cut] = []
    async for cut in _first_epoch(groups, planner, bounds):
        if epochs > 1:
            again.append(cut)
        yield cut
    for _ in range(epochs - 1):
        for cut in again:
            yield cut


async def _first_epoch(
    groups: AsyncIterable[Sequence[Row]], planner: Planner, bounds: Sequence[int]
) -> AsyncIterator[Cut]:
    """``bounds``: how many groups there are before each mini-batch, and in all. Those that do not come are empty."""
    coming, nothing = aiter(groups), list[Row]()
    for first, end in pairwise(bounds):
        packer = _Packer(planner)
        for seen in range(first + 1, end + 1):
            for full in packer.add(await anext(coming, nothing), more=seen < end):
                yield Cut(full, last=False)
        yield Cut(packer.rest(), last=True)
    async for _ in coming:  # whoever gives the groups may have something to do at the end
        pass


def pack(groups: Sequence[Sequence[Row]], planner: Planner) -> list[Sequence[Row]]:
    """The micro-batches of groups that are all there, in order; none is empty."""
    packer = _Packer(planner)
    full = [cut for i, rows in enumerate(groups, 1) for cut in packer.add(rows, more=i < len(groups))]
    rest = packer.rest()
    return [*full, rest] if rest else full


class _Packer:
    """Fills micro-batches greedily, in order."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._pending: list[Row] = []

    def add(self, rows: Sequence[Row], more: bool) -> Iterator[Sequence[Row]]:
        """Take a group; gives the micro-batches that are full by it. ``more``: further groups are expected."""
        cost, budget = self._cost(rows), self.planner.budget
        if cost > budget and self._pending:
            yield self.rest()
            cost = self._cost(rows)
        if cost <= budget:
            self._pending += rows
        else:
            for _, trajectory in groupby(rows, key=lambda row: row.trajectory):
                whole = list(trajectory)
                if self._pending and self._cost(whole) > budget:
                    yield self.rest()
                self._pending += whole
            cost = self._cost(())
        if more and cost >= budget:
            yield self.rest()

    def rest(self) -> Sequence[Row]:
        """What is pending; nothing is, afterwards."""
        pending, self._pending = tuple(self._pending), []
        return pending

    def _cost(self, rows: Sequence[Row]) -> int:
        """Of what is pending and these."""
        return self.planner.cost([*self._pending, *rows])
