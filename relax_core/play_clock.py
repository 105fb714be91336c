"""How long tools and environment of a play have taken: the time in which its policy is sampled does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class PlayClock:
    """``async with clock``: what is inside is cancelled, and raises TimeoutError, after ``seconds`` of its own.

    ``with clock.stopped()`` inside: this does not count. Several may be at once, in any task of the loop.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._timeout: asyncio.Timeout | None = None
        self._stops = 0

    @property
    def expired(self) -> bool:
        return self._timeout is not None and self._timeout.expired()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        if self._stops == 0:
            self._left = self._stop()
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            if self._stops == 0:
                self._go_on()

    def _stop(self) -> float:
        timeout = self._timeout
        if timeout is None or timeout.expired() or (when := timeout.when()) is None:
            return self._left
        timeout.reschedule(None)
        return when - asyncio.get_running_loop().time()

    def _go_on(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout(self._left)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timeout is not None
        timeout, self._stops = self._timeout, self._stops + 1  # whoever goes on now is late
        await timeout.__aexit__(kind, error, trace)
