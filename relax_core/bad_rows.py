"""Rows of data that cannot be used: counted, named, and no more of them than allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from math import sqrt
from typing import Any

from relax_core.errors import DataError

SAID = 10
"""Bad rows that are said one by one; all of them are in the run's ``bad_rows.jsonl``."""

ENOUGH = 1000
"""With fewer rows looked at, the share that may be bad is that of so many (or of all there are)."""


class BadRows:
    """``sizes``: rows of each environment. Rows are told apart by their stream and index."""

    def __init__(self, fraction: float, sizes: Mapping[str, int], note: Callable[[str], None] = print) -> None:
        self.fraction, self.sizes, self.note = fraction, sizes, note
        self._reasons: dict[str, dict[int, str]] = {}
        self._environments: dict[str, str] = {}

    def knows(self, stream: str, index: int) -> bool:
        return index in self._reasons.get(stream, {})

    def reason(self, stream: str, index: int) -> str:
        return self._reasons[stream][index]

    def counts(self) -> dict[str, int]:
        """Different bad rows by environment."""
        found: Counter[str] = Counter()
        for stream, reasons in self._reasons.items():
            found[self._environments[stream]] += len(reasons)
        return dict(found)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Each bad row with its environment and reason."""
        for stream, reasons in self._reasons.items():
            for index, reason in sorted(reasons.items()):
                yield {"environment": self._environments[stream], "row": index, "reason": reason}

    def add(self, environment: str, stream: str, index: int, reason: str, seen: int) -> None:
        """Note a bad row. ``seen``: the environment's rows looked at so far. Raises DataError when too many are bad."""
        known = self._reasons.setdefault(stream, {})
        self._environments[stream] = environment
        if index in known:
            return
        known[index] = reason
        count, size = self.counts()[environment], self.sizes[environment]
        if count <= SAID:
            self.note(f"environments.{environment}: a bad row is left out: {reason}")
        elif count == SAID + 1:
            self.note(f"environments.{environment}: more bad rows are left out; they are listed in bad_rows.jsonl")
        if problem := too_many(count, max(seen, min(size, ENOUGH)), self.fraction):
            more = f" (and {count - 1} more)" if count > 1 else ""
            raise DataError(f"environments.{environment}: {reason}{more}: {problem}")

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {
            stream: {"environment": self._environments[stream], "rows": [[i, why] for i, why in reasons.items()]}
            for stream, reasons in self._reasons.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for stream, found in state.items():
            self._environments[stream] = found["environment"]
            self._reasons[stream] = dict(found["rows"])


def too_many(bad: int, rows: int, fraction: float) -> str | None:
    """What is wrong when more than a ``fraction`` of so many rows is bad, or all of them."""
    if bad and (bad > fraction * rows or bad >= rows):
        return f"{bad} of {rows} rows are bad, data.max_bad_fraction allows {fraction:g}: mend the data, or allow more"
    return None


def sample_problem(
    bad: Collection[int], looked_at: Collection[int], size: int, head: int, fraction: float
) -> str | None:
    """What is wrong with a data set of which only some places were looked at: its first ``head``, and some at random.

    Bad rows at the beginning may be all there are: they count against the whole. Those at random tell of the share; it
    must lie three standard deviations above what is allowed.
    """
    if len(looked_at) >= size or len(bad) > fraction * size:
        return too_many(len(bad), size, fraction)
    chosen = [place for place in looked_at if place >= head]
    found = sum(place in bad for place in chosen)
    if found > 1 + fraction * len(chosen) + 3 * sqrt(len(chosen) * fraction * (1 - fraction)):
        return (
            f"{found} of {len(chosen)} rows chosen at random are bad, data.max_bad_fraction allows {fraction:g}: mend "
            "the data, or allow more"
        )
    return None
