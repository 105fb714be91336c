"""Workers between the bus and the bus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_core.interfaces.component import Columns

if TYPE_CHECKING:
    from relax_core.bus import Claim
    from relax_core.weights import WeightUpdate


class Stage(ABC):
    """A worker that needs some columns of rows and makes others. A plain object; the runtime decides where it lives.

    Its ``Config`` may have a method ``notes(run)``, of the run file's settings: one line, which begins with the
    setting's name, for each of its own that works but is worth knowing about; ``relax check`` prints it.
    """

    name: str
    needs: frozenset[str]
    by: Literal["row", "group"] = "row"
    count: int = 1
    """Rows or groups it takes at once, at most; exactly so many if ``exact``."""
    exact: bool = False
    order: Literal["any", "started", "finished"] = "any"

    @abstractmethod
    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        """New columns by row id."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """The trainer's weights of a new version; called for every one, the first included."""

    def save(self, folder: Path) -> None:
        """Write into a folder of a checkpoint (made if needed) what cannot be built anew."""

    def load(self, folder: Path) -> None:
        """Take back what ``save`` wrote; the folder may be missing."""
