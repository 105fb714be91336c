"""For tests of engines elsewhere: engines without a model, which start at once, builders that fail, odd answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.errors import EngineError, PluginError
from relax_core.interfaces import Completion, Engine, Interrupt, Pool, Request
from relax_core.testing.errors import refused
from relax_core.types import Stop, Version

if TYPE_CHECKING:
    from relax_core.media import MediaStore
    from relax_core.remote.client import RemoteEngine
    from relax_core.weights import WeightUpdate

ENDLESS = 10**6
"""A request for so many tokens keeps a CountingEngine at work until it is cancelled."""


class CountingEngine(Engine):
    """Answers with the number of prompt tokens, and the sum of each medium's features."""

    def __init__(self, media: MediaStore) -> None:
        super().__init__(None)
        self.media, self.running, self.entered = media, 0, 0

    async def generate(self, request: Request) -> Completion:
        self.running += 1
        try:
            while request.sampling.max_new_tokens == ENDLESS:
                time.sleep(0.01)  # as a decode step would, it holds up the loop
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        sums = [int(a.sum()) for ref in request.prompt.media for a in self.media.get(ref.key).values()]
        ids = [len(request.prompt.ids), *sums]
        return Completion(ids, [0.0] * len(ids), [Version(0, 0)] * len(ids), Stop.EOS)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    def enter(self, pool: Pool) -> None:
        self.entered += 1

    def leave(self, pool: Pool) -> None:
        self.entered -= 1

    async def health(self) -> Mapping[str, float]:
        return {"running": float(self.running), "entered": float(self.entered)}


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


class OddEngine(CountingEngine):
    """Answers ``share_weights`` with what cannot travel, or cannot be read at the other end."""

    async def share_weights(self, host: str | None = None) -> WeightUpdate:
        return Unreadable() if host == "unreadable" else (lambda: None)  # type: ignore[return-value]


@dataclass(frozen=True)
class OddBuilder:
    """Builds an OddEngine."""

    def __call__(self) -> tuple[Engine, MediaStore]:
        from relax_core.media import MediaStore

        media = MediaStore({}, max_bytes=0)
        return OddEngine(media), media


@dataclass(frozen=True)
class CountingBuilder:
    """Builds a CountingEngine."""

    def __call__(self) -> tuple[Engine, MediaStore]:
        from relax_core.media import MediaStore

        media = MediaStore({}, max_bytes=0)  # keeps nothing by itself: what is there is held by the caller's side
        return CountingEngine(media), media


@dataclass(frozen=True)
class RefusingBuilder:
    """Cannot build."""

    def __call__(self) -> tuple[Engine, MediaStore]:
        raise PluginError("engine.id: 'nothing' is no engine")


@dataclass(frozen=True)
class VanishingBuilder:
    """Takes its process with it."""

    def __call__(self) -> tuple[Engine, MediaStore]:
        os._exit(7)


async def check_what_cannot_travel(e: RemoteEngine) -> None:
    """An OddEngine elsewhere: whatever of a message or an answer cannot travel or be read, nobody waits for ever."""
    from relax_core.testing.engines import request

    odd, good = await asyncio.gather(e.share_weights(), e.generate(request("good", [3])), return_exceptions=True)
    assert isinstance(odd, EngineError) and "an answer of the engine cannot travel" in str(odd)
    assert isinstance(good, Completion)
    with refused("an answer of it cannot be read: ValueError", kind=EngineError):
        await e.share_weights("unreadable")
    await e.start()
    waiting = asyncio.create_task(e.generate(request("waits", [3], ENDLESS)))
    await asyncio.sleep(0)
    for asked in (e.generate(request("odd", [3], order=(lambda: 0,))), waiting):  # type: ignore[arg-type]
        with refused("a message to it cannot travel", kind=EngineError):
            await asked
