"""Turns on the same devices: the engine samples while the trainer sleeps, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, Trainer


class Turns:
    """Who has the devices. Where engine and trainer have their own (``shared`` False), nobody ever sleeps."""

    def __init__(self, engine: Engine, trainer: Trainer, shared: bool) -> None:
        self.engine, self.trainer, self.shared = engine, trainer, shared
        self.whose: Literal["both", "engine", "trainer"] = "both"
        """``both``: at the start of a run, until the first weights are published."""
        self._asking = 0
        self._changed = asyncio.Condition()

    async def to_trainer(self) -> None:
        """The engine frees its memory (what it was sampling is continued later), then the trainer takes it."""
        if self.shared and self.whose == "engine":
            self.whose = "trainer"
            async with self._changed:
                await self._changed.wait_for(lambda: not self._asking)
            await self.engine.sleep()
            await self.trainer.wake()

    async def to_engine(self) -> None:
        """The trainer frees its memory, then the engine takes it. Publish before: a sleeping trainer cannot."""
        if self.shared and self.whose != "engine":
            await self.trainer.sleep()
            if self.whose == "trainer":
                await self.engine.wake()
            async with self._changed:
                self.whose = "engine"
                self._changed.notify_all()

    @asynccontextmanager
    async def of_engine(self) -> AsyncIterator[None]:
        """Inside, the engine serves, for what asks it and has a limit of time: the trainer's turn waits for the end.

        Enter it from outside the trainer's turn only if nothing in that turn waits for the block.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.whose != "trainer")
            self._asking += 1
        try:
            yield
        finally:
            async with self._changed:
                self._asking -= 1
                self._changed.notify_all()
