"""Python's cycle collector, run between steps instead of in the middle of them.

A run keeps many small objects for a while (trajectories, rows kept for the next checkpoint). The automatic collector
walks them again and again, which takes a large part of a small run's CPU time.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

FULL = 20
"""Steps between two collections that look at everything made since training began."""


class Collector:
    """``with Collector() as collector``: nothing is collected but in ``step``; afterwards all is as it was before."""

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()  # what was imported and built by now stays for the whole run
        gc.disable()
        return self

    def step(self, version: int) -> None:
        """Collect what the last steps left in cycles."""
        gc.collect(2 if version % FULL == 0 else 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
        gc.unfreeze()
