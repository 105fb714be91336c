"""The plan of a step: whole groups, bounded micro-batches, mini-batches and epochs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest

from relax_core.interfaces import Cut, Row
from relax_core.plan import pack, plan


class Tokens:
    """A planner for which a row costs what its ``cost`` column says."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def cost(self, rows: Sequence[Row]) -> int:
        return sum(row.columns["cost"] for row in rows)


def group(name: str, *costs: int) -> list[Row]:
    return [Row(f"{name}/{i}", name, {"cost": c}) for i, c in enumerate(costs)]


async def stream(groups: Iterable[Sequence[Row]]) -> AsyncIterator[Sequence[Row]]:
    for rows in groups:
        yield rows


def cuts(
    groups: Sequence[Sequence[Row]], budget: int, updates: int = 1, epochs: int = 1
) -> list[tuple[list[str], bool]]:
    async def collect() -> list[Cut]:
        return [cut async for cut in plan(stream(groups), Tokens(budget), updates, epochs, len(groups))]

    return [([row.id for row in cut.rows], cut.last) for cut in asyncio.run(collect())]


def test_groups_are_packed_in_order_up_to_the_budget() -> None:
    groups = [group("a", 2, 2), group("b", 3), group("c", 3), group("d", 1)]
    assert cuts(groups, 8) == [(["a/0", "a/1", "b/0"], False), (["c/0", "d/0"], True)]


def test_a_group_is_split_only_if_it_alone_exceeds_the_budget() -> None:
    groups = [group("a", 1), group("b", 4, 4, 4, 4, 9), group("c", 1)]
    assert cuts(groups, 8) == [
        (["a/0"], False),
        (["b/0", "b/1"], False),
        (["b/2", "b/3"], False),
        (["b/4"], False),  # a row is never split
        (["c/0"], True),
    ]


def test_every_row_comes_once_whatever_the_budget() -> None:
    groups = [group(str(g), *(1 + (g * i) % 5 for i in range(6))) for g in range(7)]
    everything = [row.id for rows in groups for row in rows]
    for budget in (1, 3, 10, 25, 1000):
        found = cuts(groups, budget)
        assert [id for ids, _ in found for id in ids] == everything
        assert [last for _, last in found] == [False] * (len(found) - 1) + [True]


def test_a_full_cut_does_not_wait_for_the_next_group() -> None:
    async def first_cut() -> tuple[list[str], int]:
        taken = 0

        async def groups() -> AsyncIterator[Sequence[Row]]:
            nonlocal taken
            for name in "abcd":
                taken += 1
                yield group(name, 4)

        async for cut in plan(groups(), Tokens(8), 1, 1, 4):
            return [row.id for row in cut.rows], taken
        raise AssertionError("no cut")

    assert asyncio.run(first_cut()) == (["a/0", "b/0"], 2)


def test_the_last_update_ends_also_without_rows() -> None:
    assert cuts([], 8) == [([], True)]
    assert cuts([], 8, updates=2) == [([], True), ([], True)]


def test_fewer_groups_than_announced_still_end_the_update() -> None:
    async def collect() -> list[Cut]:
        return [cut async for cut in plan(stream([group("a", 8)]), Tokens(8), 1, 1, groups_per_step=3)]

    assert [(len(cut.rows), cut.last) for cut in asyncio.run(collect())] == [(1, False), (0, True)]


def test_mini_batches_have_equally_many_groups_and_epochs_repeat_them() -> None:
    groups = [group(name, 2) for name in "abcdef"]
    mini = [(["a/0"], False), (["b/0"], True), (["c/0"], False), (["d/0"], True), (["e/0"], False), (["f/0"], True)]
    assert cuts(groups, 3, updates=3) == mini
    assert cuts(groups, 3, updates=6, epochs=2) == mini + mini
    whole = [([f"{name}/0" for name in "abcdef"], True)]
    assert cuts(groups, 99, updates=2, epochs=2) == whole + whole


@pytest.mark.parametrize(("updates", "epochs"), [(2, 1), (4, 2)])
def test_several_updates_are_cut_as_their_groups_come(updates: int, epochs: int) -> None:
    """How many groups were asked for at each cut: no more than its mini-batch needs, none in later epochs."""

    async def asked() -> list[tuple[str, bool, int]]:
        taken, found = 0, []

        async def groups() -> AsyncIterator[Sequence[Row]]:
            nonlocal taken
            for name in "abcd":
                taken += 1
                yield group(name, 9)

        async for cut in plan(groups(), Tokens(8), updates, epochs, 4):
            found.append((cut.rows[0].id, cut.last, taken))
        return found

    first = [("a/0", False, 1), ("b/0", True, 2), ("c/0", False, 3), ("d/0", True, 4)]
    again = [(id, last, 4) for id, last, _ in first]
    assert asyncio.run(asked()) == first + again * (epochs - 1)


def test_who_gives_the_groups_is_let_end() -> None:
    ended = []

    async def groups() -> AsyncIterator[Sequence[Row]]:
        try:
            yield group("a", 1)
        finally:
            ended.append(True)

    async def collect() -> None:
        async for _ in plan(groups(), Tokens(8), 2, 1, 1):
            pass
        assert ended

    asyncio.run(collect())


@pytest.mark.parametrize("budget", [3, 5, 100])
def test_packing_at_once_cuts_as_the_stream_does(budget: int) -> None:
    groups = [group(name, 2, 1, 1) for name in "abcde"]
    assert [[row.id for row in rows] for rows in pack(groups, Tokens(budget))] == [
        ids for ids, _ in cuts(groups, budget)
    ]
    assert pack([], Tokens(budget)) == []
