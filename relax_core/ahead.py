"""Work on a stream of items ahead of who takes the results, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Begin = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
"""Makes a task; where one is left behind, who makes them ends it."""


async def ahead(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], begin: Begin = asyncio.create_task
) -> AsyncIterator[R]:
    """What ``work`` makes of each item, in the order of the items.

    Items are taken and worked on as they come, all at the same time, whether or not somebody waits for a result. Raises
    what an item, or the work on it, raised.
    """
    begun: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue()
    tasks: list[asyncio.Task[Any]] = []

    async def one(item: T) -> R:
        return await work(item)

    async def take() -> None:
        async for item in items:
            tasks.append(begin(one(item)))
            begun.put_nowait(tasks[-1])

    tasks.append(taking := begin(take()))
    taking.add_done_callback(lambda _: begun.put_nowait(None))
    try:
        while (task := await begun.get()) is not None:
            yield await task
        await taking
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
