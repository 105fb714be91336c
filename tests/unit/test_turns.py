"""Whose turn it is on shared devices: what asks the engine is let to end, and waits while it sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

from relax_core.turns import Turns


class Sleeper:
    """Notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    async def sleep(self) -> None:
        self.log.append(f"{self.name} sleeps")

    async def wake(self) -> None:
        self.log.append(f"{self.name} wakes")


def turns(log: list[str], shared: bool = True) -> Turns:
    engine: Any = Sleeper("engine", log)
    trainer: Any = Sleeper("trainer", log)
    return Turns(engine, trainer, shared)


async def some() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_engine_sleeps_when_nobody_asks_it_any_more() -> None:
    async def main() -> None:
        log: list[str] = []
        t, may_end = turns(log), asyncio.Event()
        await t.to_engine()

        async def ask(name: str) -> None:
            async with t.of_engine():
                log.append(f"{name} asks")
                await may_end.wait()
                log.append(f"{name} has asked")

        first = asyncio.create_task(ask("first"))
        await some()
        away = asyncio.create_task(t.to_trainer())
        await some()
        late = asyncio.create_task(ask("late"))  # it comes when the engine is about to sleep
        await some()
        assert log == ["trainer sleeps", "first asks"]
        may_end.set()
        await asyncio.gather(first, away)
        await some()
        assert log[2:] == ["first has asked", "engine sleeps", "trainer wakes"] and not late.done()
        await t.to_engine()
        await late
        assert log[5:] == ["trainer sleeps", "engine wakes", "late asks", "late has asked"]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_error_of_who_asks_gives_the_turn_back() -> None:
    async def main() -> None:
        log: list[str] = []
        t = turns(log)
        await t.to_engine()
        try:
            async with t.of_engine():
                raise ValueError("x")
        except ValueError:
            await t.to_trainer()
        assert log[-1] == "trainer wakes"

    asyncio.run(asyncio.wait_for(main(), 10))


def test_with_devices_of_their_own_nobody_waits() -> None:
    async def main() -> None:
        log: list[str] = []
        t = turns(log, shared=False)
        async with t.of_engine():
            await t.to_trainer()
            async with t.of_engine():
                pass
        assert not log

    asyncio.run(asyncio.wait_for(main(), 10))
