"""Work of someone else's code that must end in time: what hangs is an AssertionError, not a test that never ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
GRACE_S = 2.0
"""For a cancelled coroutine to end."""


def run_within(seconds: float, what: str, work: Callable[[], Awaitable[T]]) -> T:
    """What ``work`` returns, run in an event loop of its own. ``what`` begins the line that says that it hangs.

    A coroutine that waits too long is cancelled; one that blocks its loop or refuses to be cancelled is left behind in
    a thread that does not keep the process alive.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    async def limited() -> T:
        async with asyncio.timeout(seconds):
            return await work()

    def target() -> None:
        try:
            found.append(asyncio.run(limited()))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target, name=what[:40], daemon=True)
    thread.start()
    thread.join(seconds + GRACE_S)
    if thread.is_alive():
        raise AssertionError(
            f"{what}: not over after {seconds:g} s, and it cannot be cancelled: it blocks the event loop, or swallows "
            "CancelledError; call what blocks by asyncio.to_thread"
        )
    if raised and isinstance(raised[0], TimeoutError):
        raise AssertionError(f"{what}: not over after {seconds:g} s: it waits for something that never comes")
    if raised:
        raise raised[0]
    return found[0]
