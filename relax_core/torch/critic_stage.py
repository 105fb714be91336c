"""The stage ``critic``: the values of every state that a group's rows passed through, asked of the critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax_core.interfaces import Columns, Stage

if TYPE_CHECKING:
    from relax_core.bus import Claim
    from relax_core.setup import StageSetup


class CriticStage(Stage):
    """Makes ``values``: float32 (T,), the critic's value of the state before each sampled token, 0 elsewhere.

    It waits for the reward, so that what a filter takes away is never computed.
    """

    name = "critic"
    needs = frozenset({"tokens", "mask", "positions", "media", "reward"})
    by = "group"

    def __init__(self, setup: StageSetup) -> None:
        self.count, self.exact, self.order = setup.count, setup.exact, setup.order
        assert setup.trainer is not None  # the stage lives where the trainer can be asked
        self.trainer, self.media = setup.trainer, setup.media

    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        keys = [ref.key for row in claim.rows for ref in row.columns["media"]]
        self.media.retain(keys)  # a group may be evicted while it is computed
        try:
            made = await self.trainer.forward(claim.rows, frozenset({"values"}))
        finally:
            self.media.release(keys)
        return {row.id: columns for row, columns in zip(claim.rows, made, strict=True)}
