"""Turns on the same devices: the engine samples while the trainer sleeps, and the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, Trainer


class Turns:
    """Who has the devices. Where engine and trainer have their own (``shared`` False), nobody ever sleeps."""

    def __init__(self, engine: Engine, trainer: Trainer, shared: bool) -> None:
        self.engine, self.trainer, self.shared = engine, trainer, shared
        self.whose: Literal["both", "engine", "trainer"] = "both"
        """``both``: at the start of a run, until the first weights are published."""

    async def to_trainer(self) -> None:
        """The engine frees its memory (what it was sampling is continued later), then the trainer takes it."""
        if self.shared and self.whose == "engine":
            await self.engine.sleep()
            await self.trainer.wake()
            self.whose = "trainer"

    async def to_engine(self) -> None:
        """The trainer frees its memory, then the engine takes it. Publish before: a sleeping trainer cannot."""
        if self.shared and self.whose != "engine":
            await self.trainer.sleep()
            if self.whose == "trainer":
                await self.engine.wake()
            self.whose = "engine"
