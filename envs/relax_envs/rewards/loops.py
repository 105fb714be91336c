"""Things that belong to one event loop, made when it first asks: several loops may use a reward at once."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """``get`` gives the running loop's own thing; it is forgotten with its loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._made:
                self._made[loop] = self._make()
            return self._made[loop]

    def take(self) -> T | None:
        """The running loop's own thing, if it asked for one; the next ``get`` makes a new one."""
        with self._lock:
            return self._made.pop(asyncio.get_running_loop(), None)
