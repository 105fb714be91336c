"""Workers between the bus and the bus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from relax_core.interfaces.component import Columns

if TYPE_CHECKING:
    from relax_core.bus import Claim


class Stage(ABC):
    """A worker that needs some columns of rows and makes others. A plain object; the runtime decides where it lives."""

    name: str
    needs: frozenset[str]
    by: Literal["row", "group"] = "row"
    count: int = 1
    """Rows or groups it takes at once, at most; exactly so many if ``exact``."""
    exact: bool = False
    order: Literal["any", "started", "finished"] = "any"
    workers: int = 1
    """How many claims it works on at once."""

    @abstractmethod
    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        """New columns by row id."""
