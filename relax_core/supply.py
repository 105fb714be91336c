"""Gives engines their weights, from the publisher or from a living peer, and books who holds what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from relax_core.errors import EngineError, WeightsError
from relax_core.weight_service import Coordinator, Holding, Transfer

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, Interrupt
    from relax_core.weights import WeightUpdate

PUBLISHER = "trainer"
"""What transfers from the trainer's own publication are booked under."""


class Supply:
    """``coordinator`` knows what every living engine holds; engines are members by name."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()

    async def give(
        self, member: str, engine: Engine, update: WeightUpdate, interrupt: Interrupt = "continue", source: str = ""
    ) -> None:
        """Let it load an update, and book that. ``source``: who gives, if not the publisher."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await engine.load_weights(update, interrupt)
        version, base = update.manifest.version, update.base
        seconds, nbytes = clock() - began, update.manifest.nbytes
        self.coordinator.report(Holding(member, version, base.id if base is not None else None))
        self.coordinator.record(Transfer(version, member, source or PUBLISHER, seconds, nbytes))

    async def give_newest(self, member: str, engine: Engine, update: WeightUpdate, peers: Mapping[str, Engine]) -> None:
        """Let a newcomer load an update; where its publisher has it no more, what the best living peer holds.

        Raises WeightsError, the publisher's, when no peer can give it either.
        """
        try:
            await self.give(member, engine, update)
        except WeightsError as gone:
            for _ in peers:
                with suppress(WeightsError):
                    source = self.coordinator.source_for(member)
                    if source.member in peers and source.version == update.manifest.version:
                        with suppress(EngineError):
                            shared = await peers[source.member].share_weights()
                            return await self.give(member, engine, shared, source=source.member)
                    self.coordinator.lost(source.member)  # it holds nothing that helps; it reports again when it does
            raise gone

    def lost(self, member: str) -> None:
        self.coordinator.lost(member)
