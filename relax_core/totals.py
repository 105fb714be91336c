"""Sums over a whole run that survive its restarts: time, lag, lengths, evaluation results."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Totals:
    """Seconds are wall and CPU seconds of the training process and its children, set-up left out."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_mb: float = 0.0
    max_lag: int = 0
    lag_tokens: dict[str, int] = field(default_factory=dict)
    """Trained tokens by lag."""
    skipped_updates: int = 0
    played: int = 0
    """Finished plays, and the tokens sampled in them, trained or not."""
    played_tokens: int = 0
    trained: int = 0
    trained_tokens: int = 0
    publish_seconds: float = 0.0
    publish_bytes: int = 0
    evaluation: dict[str, dict[str, float]] = field(default_factory=dict)
    _wall: float = 0.0
    _cpu: float = 0.0

    def start_clock(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def published(self, seconds: float, nbytes: int) -> None:
        """The cost of the newest publication."""
        self.publish_seconds, self.publish_bytes = seconds, nbytes

    def state(self) -> dict[str, Any]:
        """JSON values, with the clocks up to now."""
        now, cpu = time.perf_counter(), cpu_seconds()
        self.seconds += now - self._wall
        self.cpu_seconds += cpu - self._cpu
        self._wall, self._cpu = now, cpu
        self.peak_rss_mb = max(self.peak_rss_mb, peak_rss_mb())
        return {k: v for k, v in asdict(self).items() if not k.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        known = {f.name for f in fields(self)}
        for key, value in state.items():
            if key in known:
                setattr(self, key, value)


def cpu_seconds() -> float:
    """Of this process and its living children (the engine of ``overlap: process``)."""
    import psutil

    times = os.times()
    children = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        children += used.user + used.system
    return times.user + times.system + children


def peak_rss_mb() -> float:
    """Of this process, plus what its living children hold now."""
    import resource
    import sys

    import psutil

    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)
    held = 0
    for child in psutil.Process().children(recursive=True):
        try:
            held += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return own + held / 2**20
