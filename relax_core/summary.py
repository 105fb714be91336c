"""The summary of a run, ``summary.json``, and what it cost: seconds, CPU-seconds and memory over all its resumes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relax_core import atomic
from relax_core.metrics import plain_value

COUNTS = ("issued", "trained", "filtered", "failed", "dropped", "evicted", "in_flight")


@dataclass(frozen=True, slots=True)
class Summary:
    """``groups`` has the keys of ``COUNTS``; ``evaluation`` the newest results by name (accuracy, stderr, n, ...)."""

    steps: int
    seconds: float
    cpu_seconds: float
    peak_rss_mb: float
    evaluation: Mapping[str, Mapping[str, float]]
    max_lag: int
    groups: Mapping[str, int]
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, beside the others."""

    def write(self, directory: Path) -> None:
        """Write ``summary.json``, whole or not at all."""
        values = asdict(self)
        values["groups"] = {name: self.groups.get(name, 0) for name in COUNTS}
        for name in ("seconds", "cpu_seconds", "peak_rss_mb"):
            values[name] = round(values[name], 1)
        more = values.pop("more")
        atomic.write_json(directory / "summary.json", {**plain_value_map(values), **plain_value_map(more)})


def plain_value_map(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values in the given order; NaN and inf are null."""
    return {
        key: plain_value_map(value) if isinstance(value, Mapping) else plain_value(value)
        for key, value in values.items()
    }


def identity(groups: Mapping[str, int]) -> str:
    """The accounting identity in words: where every issued group went.

    A sum that does not come out right is shown as such.
    """
    parts = ("trained", "filtered", "failed", "dropped", "in_flight")
    count = {name: groups.get(name, 0) for name in COUNTS}
    total = sum(count[name] for name in parts)
    terms = " + ".join(f"{count[name]:,} {name.replace('_', ' ')}" for name in parts)
    wrong = "" if total == count["issued"] else f" (DOES NOT ADD UP: they are {total:,})"
    return f"groups: {count['issued']:,} issued = {terms}{wrong}; {count['evicted']:,} evicted and played again"


class Usage:
    """Seconds, CPU-seconds and peak memory of this process and its children since it was made.

    ``state`` of an earlier part of the same run is added, so that a resumed run counts all its parts.
    """

    def __init__(self, state: Mapping[str, float] | None = None) -> None:
        before = state or {}
        self._seconds = before.get("seconds", 0.0) - time.monotonic()
        self._cpu_seconds = before.get("cpu_seconds", 0.0) - cpu_seconds()
        self._peak = before.get("peak_rss_mb", 0.0)

    def state(self) -> dict[str, float]:
        """``seconds``, ``cpu_seconds`` and ``peak_rss_mb`` so far. Call it every step or so: peaks are seen then."""
        self._peak = max(self._peak, peak_rss_mb())
        return {
            "seconds": self._seconds + time.monotonic(),
            "cpu_seconds": self._cpu_seconds + cpu_seconds(),
            "peak_rss_mb": self._peak,
        }


def cpu_seconds() -> float:
    """User and system time of this process, its living children, and those that it has waited for."""
    return _own_cpu() + sum(found[0] for found in _children())


def peak_rss_mb() -> float:
    """The most memory (MB = 10**6 bytes) that this process ever held, and what its children hold now."""
    return (_own_peak() + sum(found[1] for found in _children())) / 1e6


def _own_cpu() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


def _own_peak() -> int:
    try:  # ru_maxrss would also count the parent from which this process was started
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _children() -> list[tuple[float, int]]:
    """(CPU-seconds, bytes held) of the living processes that multiprocessing started here.

    A look at all processes of the machine would find others too, but takes long where there are many.
    """
    import psutil

    found = []
    for child in multiprocessing.active_children():
        try:
            process = psutil.Process(child.pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:  # it ended meanwhile
            continue
        found.append((float(times.user + times.system), int(memory.rss)))
    return found
