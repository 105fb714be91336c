"""What of a simulated run takes more time a row when there are more engines: two profiles, compared."""

from __future__ import annotations

import pstats
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SHOWN = 16


class Cost(NamedTuple):
    """Of one function, for each row."""

    calls: float
    us: float
    """Of its own, without what it calls."""


def costs(file: Path, rows: int) -> dict[tuple[str, int, str], Cost]:
    stats: Any = pstats.Stats(str(file))
    return {function: Cost(found[0] / rows, 1e6 * found[2] / rows) for function, found in stats.stats.items()}


def differences(few: tuple[Path, int], many: tuple[Path, int]) -> Iterator[str]:
    """A line for each function whose time a row grew most. The profiler makes small functions look larger."""
    before, after = costs(*few), costs(*many)
    nothing = Cost(0.0, 0.0)
    grew = sorted(after, key=lambda f: before.get(f, nothing).us - after[f].us)
    yield "what grows most, own microseconds a row (calls a row), with the fewest and with the most engines, profiled:"
    for function in grew[:SHOWN]:
        (calls, us), (more_calls, more_us) = before.get(function, nothing), after[function]
        place = f"{Path(function[0]).name}:{function[1]} {function[2]}"
        yield f"  {us:7.1f} ({calls:6.1f}) -> {more_us:7.1f} ({more_calls:6.1f})  {place}"
