"""What is counted of plays, trained or not; and when so many of them fail that the run must end."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import TYPE_CHECKING

from relax_core.errors import RelaxError

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.players import PlayCount
    from relax_core.types import Trajectory

MOST_ERRORS = 50
OTHER_ERRORS = "other errors"
LEAST_GROUPS = 20
"""In the window in which failures are counted: a task may fail as a whole, and few tasks say little."""


class PlayCounts:
    """Counts plays since the last ``take``. Says each new kind of error once, through ``note``."""

    def __init__(self, config: RunConfig, note: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """Part of a checkpoint. Beside plays, tokens, rewrites, truncated and errors: ``stops/REASON``, and
        ``errors/TYPE`` of those that failed."""
        self.errors: Counter[str] = Counter()
        """Plays that failed since this start, by what was wrong."""
        self.most = config.max_failed_fraction
        window = max(LEAST_GROUPS, 2 * config.groups_per_step) * config.group_size
        self._newest: deque[str | None] = deque(maxlen=window)
        self._note = note

    def add(self, plays: Iterable[PlayCount]) -> None:
        """Count plays. Raises RelaxError when more than ``max_failed_fraction`` of the newest ones failed."""
        for play in plays:
            self._add(play)
        failed = [error for error in self._newest if error is not None]
        if len(self._newest) == self._newest.maxlen and len(failed) > self.most * len(self._newest):
            error, count = Counter(failed).most_common(1)[0]
            raise RelaxError(
                f"max_failed_fraction: {len(failed)} of the last {len(self._newest)} plays failed, {self.most:g} of "
                f"them may; most often ({count} times): {error}; put it right, or allow more"
            )

    def _add(self, play: PlayCount) -> None:
        self.counts["plays"] += 1
        self.counts["tokens"] += play.tokens
        self.counts["rewrites"] += play.rewrites
        self.counts["truncated"] += play.stop.cut
        self.counts[f"stops/{play.stop}"] += 1
        self._newest.append(str(play.error) if play.error else None)
        if play.error:
            self.counts["errors"] += 1
            self.counts[f"errors/{play.error.type}"] += 1
            self._report(str(play.error))

    def _report(self, error: str) -> None:
        """Say each kind of error once, and count it; the first so many, since a text may differ every time."""
        if error not in self.errors and len(self.errors) < MOST_ERRORS:
            self._note(f"a play failed: {error}")
            self.errors[error] = 0
        self.errors[error if error in self.errors else OTHER_ERRORS] += 1

    def take(self) -> Counter[str]:
        counts, self.counts = self.counts, Counter()
        return counts


def count_metrics(counts: Counter[str]) -> dict[str, float]:
    """What a step logs of the plays that ended since the last one."""
    plays = counts["plays"]
    named = {key: counts[key] for key in counts if key.startswith(("stops/", "errors/"))}
    shown = {key: counts[key] for key in ("truncated", "errors", "rewrites")} | named
    return {f"plays/{key}": value for key, value in shown.items()} | {
        "plays/failed_fraction": counts["errors"] / plays if plays else 0.0
    }


def noted_means(plays: Iterable[Trajectory]) -> dict[str, float]:
    """The mean of each number that was noted of plays (by environments and rewards), over those that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for play in plays:
        for name, value in play.metrics.items():
            if name != "rewrites" and not name.endswith("/failures"):
                found[name].append(value)
    return {name: fmean(values) for name, values in sorted(found.items())}
