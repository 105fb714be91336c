"""What the bus's contract checks are made of: how to get a bus, and short words for common calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from relax_core.bus import Bus, Claim, Holder

TIMEOUT_S = 30.0
PLAYED = frozenset({"tokens"})
SCORED = frozenset({"tokens", "reward"})


async def _turns() -> None:
    """Let everything move that can, in this event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Kit:
    """How checks get a bus (``make(max_rows, max_bytes)``), and how they wait until all has moved that can."""

    make: Callable[[int, int], Bus]
    settle: Callable[[], Awaitable[None]] = _turns

    def bus(self, max_rows: int = 1000, max_bytes: int = 1_000_000) -> Bus:
        return self.make(max_rows, max_bytes)

    async def waits(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a call that must wait."""
        task = asyncio.ensure_future(call)
        await self.settle()
        assert not task.done(), f"this should wait, and gave {task}"
        return task


Check = Callable[[Kit], Coroutine[Any, Any, None]]


def run_check(check: Check, kit: Kit) -> None:
    """Run one check in an event loop of its own, with a time limit."""
    asyncio.run(asyncio.wait_for(check(kit), TIMEOUT_S))


async def play(bus: Bus, holder: Holder, group: str, serial: int, rows: int = 2) -> None:
    """A whole group: opened, filled with rows ``<group>/<member>/0`` of one column, closed."""
    await bus.open_group(group, serial, f"task of {group}", holder)
    await bus.put(played(group, rows), holder, group)
    await bus.close_group(group, rows, holder)


def played(group: str, rows: int = 2, column: str = "tokens", first: int = 0) -> dict[str, dict[str, Any]]:
    return {f"{group}/{m}/0": {column: f"{column} {group}/{m}"} for m in range(first, first + rows)}


async def score(bus: Bus, holder: Holder, group: str, rows: int = 2) -> None:
    assert await bus.put(played(group, rows, "reward"), holder) == rows


async def train(bus: Bus, holder: Holder, count: int, needs: frozenset[str] = PLAYED, **how: Any) -> Claim:
    return await bus.claim("train", needs, count, "group", holder, **how)


def ids(claim: Claim) -> list[str]:
    return [row.id for row in claim.rows]
