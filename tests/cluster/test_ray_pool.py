"""Pools of actors that remember nothing: what dies is made anew, also when it dies again before it is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import ray

from relax_core.errors import RelaxError
from relax_plugin_ray.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


class Mortal:
    """Dies while it becomes ready as often as its file says, and is slow to become so where it says so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, 0

    async def ready(self) -> None:
        deaths = self.folder / "deaths"
        left = int(deaths.read_text()) if deaths.exists() else 0
        if left:
            deaths.write_text(str(left - 1))
            os._exit(1)
        if (self.folder / "slow").exists():
            await asyncio.sleep(30)

    async def ask(self) -> tuple[int, int]:
        self.asked += 1
        return os.getpid(), self.asked

    async def die(self) -> None:
        os._exit(1)


def pool_of(folder: Path, replicas: int, notes: list[str], restarts: int = 5) -> Pool:
    make: Any = ray.remote(Mortal).options(num_cpus=0)
    return Pool("mortals", lambda index: make.remote(folder), replicas, restarts, notes.append)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 80))


def test_all_are_asked_those_made_anew_too(cluster: str, tmp_path: Path) -> None:
    async def test() -> None:
        notes: list[str] = []
        pool = pool_of(tmp_path, 2, notes)
        await pool.start(60)
        first = await pool.all(lambda actor: actor.ask.remote())
        assert [asked for _, asked in first] == [1, 1] and len({pid for pid, _ in first}) == 2
        (tmp_path / "deaths").write_text("1")  # the first that is made in its place dies at once
        pool.actors[1].die.remote()
        second = await asked_until_dead(pool, first[1][0])
        assert second[0] == (first[0][0], second[0][1]) and second[1] not in first and second[1][1] == 1
        assert len(notes) == 2 and all(line.startswith("mortals 1 died (") for line in notes)
        pool.stop()

    run(test)


async def asked_until_dead(pool: Pool, pid: int) -> list[tuple[int, int]]:
    """What all say once this process is gone."""
    while True:
        found: list[tuple[int, int]] = await pool.all(lambda actor: actor.ask.remote())
        if pid not in [own for own, _ in found]:
            return found
        await asyncio.sleep(0.05)


def test_deaths_before_it_is_ready_count(cluster: str, tmp_path: Path) -> None:
    async def test() -> None:
        pool = pool_of(tmp_path, 1, [], restarts=2)
        await pool.start(60)
        (tmp_path / "deaths").write_text("9")
        pool.actors[0].die.remote()
        with pytest.raises(RelaxError, match=r"mortals 0: it died once more after 2 restarts within 600 s"):
            while True:
                await pool.call(lambda actor: actor.ask.remote())
        pool.stop()

    run(test)


def test_one_that_cannot_become_ready_is_an_error(cluster: str, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "slow").touch()
        pool = pool_of(tmp_path, 1, [])
        with pytest.raises(RelaxError, match=r"mortals: it was not ready within 3 s: see its log, or raise"):
            await pool.start(3)
        pool.stop()
        (tmp_path / "deaths").write_text("1")
        with pytest.raises(RelaxError, match=r"mortals: it died while it was built \("):
            await pool_of(tmp_path, 1, []).start(60)

    run(test)
