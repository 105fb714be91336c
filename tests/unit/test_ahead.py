"""Work ahead of who takes the results: in order, at the same time, and nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import cast

import pytest

from relax_core.ahead import ahead

pytestmark = pytest.mark.timeout(10)


async def numbers(count: int, taken: list[int], error: Exception | None = None) -> AsyncIterator[int]:
    for i in range(count):
        taken.append(i)
        yield i
        await asyncio.sleep(0)
    if error is not None:
        raise error


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_results_come_in_the_order_of_the_items() -> None:
    """Whichever work ends first."""

    async def work(i: int) -> int:
        await asyncio.sleep(0.01 * (5 - i))
        return 10 * i

    async def test() -> None:
        assert [found async for found in ahead(numbers(5, []), work)] == [0, 10, 20, 30, 40]

    asyncio.run(test())


def test_all_is_begun_while_nobody_takes_results() -> None:
    async def test() -> None:
        taken: list[int] = []
        begun: list[int] = []
        doors = [asyncio.Event() for _ in range(4)]

        async def work(i: int) -> int:
            begun.append(i)
            await doors[i].wait()
            return i

        async with aclosing(closable(ahead(numbers(4, taken), work))) as results:
            doors[0].set()
            assert await anext(results) == 0
            await turns()
            assert taken == begun == [0, 1, 2, 3]
            following = asyncio.ensure_future(anext(results))
            doors[3].set()
            doors[2].set()
            await turns()
            assert not following.done()  # the second is not there yet
            doors[1].set()
            assert [await following, await anext(results), await anext(results)] == [1, 2, 3]

    asyncio.run(test())


@pytest.mark.parametrize("where", ["item", "work"])
def test_errors_are_raised_where_they_belong(where: str) -> None:
    async def work(i: int) -> int:
        if where == "work" and i == 2:
            raise ValueError("work")
        return i

    async def test() -> None:
        found: list[int] = []
        broken = ValueError("item") if where == "item" else None
        with pytest.raises(ValueError, match=where):
            async for i in ahead(numbers(3, [], broken), work):
                found.append(i)
        assert found == ([0, 1, 2] if where == "item" else [0, 1])

    asyncio.run(test())


def test_who_stops_taking_leaves_nothing_running() -> None:
    async def test() -> None:
        cancelled: list[int] = []

        async def work(i: int) -> int:
            try:
                await asyncio.sleep(60 * i)
            except asyncio.CancelledError:
                cancelled.append(i)
                raise
            return i

        async with aclosing(closable(ahead(endless(), work))) as results:
            assert await anext(results) == 0
            await turns()
        assert len(asyncio.all_tasks()) == 1 and cancelled

    asyncio.run(test())


async def endless() -> AsyncIterator[int]:
    i = 0
    while True:
        yield i
        i += 1
        await asyncio.sleep(0)


def test_tasks_are_made_by_whom_it_is_told() -> None:
    made: list[asyncio.Task[object]] = []

    def begin(work: object) -> asyncio.Task[object]:
        made.append(asyncio.create_task(work))  # type: ignore[arg-type]
        return made[-1]

    async def test() -> None:
        double: Callable[[int], Awaitable[int]] = lambda i: asyncio.sleep(0, 2 * i)  # noqa: E731
        assert [i async for i in ahead(numbers(2, []), double, begin)] == [0, 2]
        assert len(made) == 3  # one that takes items, one for each

    asyncio.run(test())


def closable(results: AsyncIterator[int]) -> AsyncGenerator[int, None]:
    """The same object."""
    return cast("AsyncGenerator[int, None]", results)
