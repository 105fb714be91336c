"""What one training step has come to so far, on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from relax_core.interfaces import Algorithm, Row
from relax_core.torch.tally import Tally


@dataclass(slots=True)
class StepState:
    """Counts are those of this rank; ``moved`` and ``nonfinite`` are the same on all."""

    number: int
    algorithm: Algorithm
    tally: Tally = field(default_factory=Tally)
    cuts: list[tuple[list[str], bool]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    """Of the micro-batches of the update that is open."""
    units: float = 0.0
    """Of all ranks' rows of it; known when it ends."""
    error: Exception | None = None
    """What went wrong on this rank since the last update."""
    open: bool = False
    moved: list[bool] = field(default_factory=list)
    """Of each update that has ended, whether it changed a weight."""
    nonfinite: int = 0
    computed: int = 0
    compared: set[str] = field(default_factory=set)

    def close(self) -> tuple[float, list[Tensor]]:
        """End the open update; its units and its micro-batches' losses."""
        units, losses = self.units, self.losses
        self.units, self.losses, self.open = 0.0, [], False
        return units, losses

    def first_time(self, rows: Sequence[Row]) -> bool:
        """Whether these rows are trained for the first time in this step (epochs repeat them)."""
        ids = {row.id for row in rows}
        new = not ids & self.compared
        self.compared |= ids
        return new


def units_of(rows: Sequence[Row]) -> float:
    """What rows add to the loss's global count."""
    return math.fsum(float(row.columns["units"]) for row in rows)
