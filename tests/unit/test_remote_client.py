"""Who is at work while an engine elsewhere is being started: told once, when it listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relax_core.errors import EngineError
from relax_core.media import MediaStore
from relax_core.remote.client import READY, RemoteEngine
from relax_core.remote.sent import SentMedia


class Far(RemoteEngine):
    """Its other end is a list, and says that it listens when ``listens`` is set."""

    def __init__(self) -> None:
        super().__init__(SentMedia(MediaStore({}, 0), 0))
        self.heard: list[Any] = []
        self.listens = asyncio.Event()

    async def start(self) -> None:
        self._open(self.heard.extend)
        opening = asyncio.create_task(self._begin())
        await self.listens.wait()
        await asyncio.sleep(0)
        self._deliver([(READY, None, True)])
        await opening

    async def stop(self) -> None:
        self._die("it was stopped")


def test_parties_that_come_and_go_while_it_starts_are_told_when_it_listens() -> None:
    async def run() -> list[Any]:
        far = Far()
        far.enter("train")
        starting = asyncio.create_task(far.start())
        await asyncio.sleep(0)
        far.enter("train")
        far.enter("eval")
        far.leave("train")
        with pytest.raises(EngineError, match="it is being started"):
            await far.settled()
        await asyncio.sleep(0.01)
        assert far.heard == []
        far.listens.set()
        await starting
        far.leave("eval")
        await asyncio.sleep(0.01)
        return far.heard

    assert asyncio.run(run()) == [("enter", "train"), ("enter", "eval"), ("leave", "eval")]


def test_a_second_start_tells_them_again() -> None:
    async def run() -> list[Any]:
        far = Far()
        far.listens.set()
        await far.start()
        far.enter("train")
        await asyncio.sleep(0)
        await far.stop()
        far.enter("train")
        far.leave("train")
        far.heard.clear()
        await far.start()
        await asyncio.sleep(0.01)
        return far.heard

    assert asyncio.run(run()) == [("enter", "train")]
