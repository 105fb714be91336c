"""Sums over a whole run that survive its restarts: what was played and trained, lag, cost, evaluation results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_core.summary import Usage


@dataclass(slots=True)
class Counts:
    """``lag_tokens``: trained tokens by lag. Lengths are sampled tokens; plays that failed count as played only."""

    max_lag: int = 0
    lag_tokens: dict[str, int] = field(default_factory=dict)
    skipped_updates: int = 0
    failed_plays: int = 0
    """Plays that ended by an error; they are among the played ones."""
    played: int = 0
    played_tokens: int = 0
    trained: int = 0
    trained_tokens: int = 0
    evaluation: dict[str, dict[str, float]] = field(default_factory=dict)
    """The newest results by set."""


class Totals:
    """``counts`` and ``usage`` of all parts of the run so far."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.usage = Usage()

    @property
    def evaluation(self) -> dict[str, dict[str, float]]:
        return self.counts.evaluation

    @property
    def max_lag(self) -> int:
        return self.counts.max_lag

    def add(self, lags: Counter[int], skipped: int, played: tuple[int, int], trained: tuple[int, int]) -> None:
        """A step's trained tokens by lag, skipped updates, and (plays, tokens) as played and as trained."""
        counts = self.counts
        counts.max_lag = max(counts.max_lag, *lags, 0)
        for lag, n in lags.items():
            counts.lag_tokens[str(lag)] = counts.lag_tokens.get(str(lag), 0) + n
        counts.skipped_updates += skipped
        counts.played += played[0]
        counts.played_tokens += played[1]
        counts.trained += trained[0]
        counts.trained_tokens += trained[1]

    def lengths(self) -> dict[str, Any]:
        """What is worth a look in the summary: lag and lengths, as trained beside as played."""
        counts = self.counts
        return {
            "lag_tokens": dict(sorted(counts.lag_tokens.items())),
            "mean_length": {
                "trained": counts.trained_tokens / counts.trained if counts.trained else None,
                "played": counts.played_tokens / counts.played if counts.played else None,
            },
            "skipped_updates": counts.skipped_updates,
            "failed_plays": counts.failed_plays,
        }

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"counts": asdict(self.counts), "usage": self.usage.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts = Counts(**state["counts"])
        self.usage = Usage(state["usage"])
