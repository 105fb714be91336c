"""One engine of several: what state it is in, and how often it may be started again, after which delays."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.interfaces import Engine

_LONGEST_DELAY_S = 30.0


class State(Enum):
    SERVING = "serving"
    RESTARTING = "restarting"
    OUT = "out"


@dataclass(slots=True)
class Replica:
    """An engine at its place among the others."""

    index: int
    engine: Engine
    restarts: Restarts
    state: State = State.RESTARTING
    incarnation: int = 0
    """Grows whenever it is found dead: a call that fails after that needs no further question."""
    reason: str = ""
    """Why it was found dead, or could not be started."""
    reviving: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    def cancel(self) -> list[asyncio.Task[None]]:
        """What was going on about it is cancelled: these tasks."""
        tasks = [task for task in (self.reviving, self.watching) if task is not None]
        self.reviving = self.watching = None
        for task in tasks:
            task.cancel()
        return tasks


class Restarts:
    """At most ``most`` within ``within_s`` seconds: the first at once, then after ``delay_s``, and twice as long each
    time, up to 30 s."""

    def __init__(self, most: int, within_s: float, delay_s: float) -> None:
        self.most, self.within_s, self.delay_s = most, within_s, delay_s
        self._times: deque[float] = deque()

    def __str__(self) -> str:
        return f"{self.most} restarts within {self.within_s:g} s"

    def clear(self) -> None:
        self._times.clear()

    def delay(self, now: float) -> float | None:
        """Seconds until the next restart, which is counted now; None: there is none."""
        while self._times and self._times[0] <= now - self.within_s:
            self._times.popleft()
        before = len(self._times)
        if before >= self.most:
            return None
        self._times.append(now)
        return min(self.delay_s * 2.0 ** (before - 1), _LONGEST_DELAY_S) if before else 0.0
