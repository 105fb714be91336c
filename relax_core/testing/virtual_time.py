"""An event loop whose clock jumps to the next timer as soon as nothing is left to do: hours of waiting pass at once.

    ended = virtually(main())       # ``main`` may sleep, wait with timeouts and use executors; nothing really waits

Whatever runs on it must wait for timers and for other coroutines alone: files of sockets and pipes are never looked at.
What is given to an executor is done at once, in this thread, and takes no virtual time: order depends on the program
alone, so two runs are equal.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StoodStill(RuntimeError):
    """Every coroutine waits for another one: no timer is set, so nothing would ever happen again."""


class _Jump(selectors.SelectSelector):
    """A selector that watches nothing: the seconds that it is asked to wait have passed when it returns."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StoodStill(f"virtual time {self.now:g} s: every coroutine waits and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0 and advances only by jumps from timer to timer."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call it now; the future is done when this returns."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as ``asyncio.run`` does, in virtual time. Raises StoodStill where it would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
