"""Blocking work beside the event loop, whose result is undone when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """What ``work`` gives. It goes on when its caller is cancelled; ``undo`` then gets what it gave, if it gave any."""

    def give_up(done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            undo(done.result())

    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(give_up)
        raise
