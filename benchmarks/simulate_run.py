"""One simulated run: a run file, trained by the real loop in virtual time, and what was measured of it."""

from __future__ import annotations

import cProfile
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from unittest import mock

from benchmarks.simulate_costs import Costs

if TYPE_CHECKING:
    from benchmarks.simulate_parts import Meter
    from benchmarks.simulate_plugin import Watch

PLUGIN = EntryPoint("simulate", "benchmarks.simulate_plugin", "relax.plugins")
LIMIT = 256
"""Tokens of a reply, at most."""


@dataclass(frozen=True)
class Setting:
    """What is simulated. ``measured`` steps follow ``warmup`` ones; without ``measured`` the run goes to its end of
    ``steps``."""

    engines: int
    ranks: int
    placement: Literal["colocate", "separate"]
    staleness: int
    groups_per_step: int
    group_size: int = 8
    tools: int = 0
    filtered: float = 0.0
    failed: float = 0.0
    warmup: int = 6
    measured: int = 0
    steps: int = 1000
    seed: int = 0

    @property
    def rows_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    def changed(self, **fields: Any) -> Setting:
        return replace(self, **fields)


def run_file(s: Setting, folder: Path, costs: Costs) -> dict[str, Any]:
    """The setting as a run file."""
    return {
        "name": "simulated",
        "runs": str(folder),
        "plugins": ["simulate"],
        "seed": s.seed,
        "steps": s.steps,
        "groups_per_step": s.groups_per_step,
        "group_size": s.group_size,
        "max_staleness": s.staleness,
        "model": {"id": "simulated"},
        "environments": [{"id": "simulated", "tools": s.tools, "failed": s.failed, "seed": s.seed}],
        "rewards": [{"id": "simulated"}],
        "algorithm": {"id": "grpo"},
        "sampling": {"max_new_tokens": LIMIT},
        "runtime": {
            "id": "simulated",
            "engines": s.engines,
            "ranks": s.ranks,
            "placement": s.placement,
            "costs": asdict(costs),
        },
        "callbacks": [
            {"id": "watch", "filtered": s.filtered, "seed": s.seed}
            | ({"enough": s.warmup + s.measured} if s.measured else {})
        ],
        "checkpoint": {"every": 100_000},
        "trajectories": {"every": 100_000},
        "bus": {"max_rows": 10_000_000, "max_bytes": 1 << 40},
    }


def simulate(s: Setting, costs: Costs, profile: Path | None = None) -> dict[str, Any]:
    """Run it. ``profile``: where to write cProfile's statistics (which slows it)."""
    from benchmarks.simulate_parts import Enough
    from relax_core.config.resolve import resolve
    from relax_core.launch import claim
    from relax_core.plugins import installed_plugins
    from relax_core.run import Run
    from relax_core.screen import Screen
    from relax_core.testing.virtual_time import virtually
    from relax_core.train import train

    with tempfile.TemporaryDirectory() as folder:
        config, stack = resolve(run_file(s, Path(folder), costs), installed=[*installed_plugins(), PLUGIN])
        run = Run(config, config.runs / config.name, stack)
        claim(run)
        section = config.callbacks[0]
        watch = cast("Watch", stack.build("callbacks", section, where="callbacks.0"))
        stack.add_callback(watch, "callbacks.0")
        profiler = cProfile.Profile() if profile else None
        with Screen(run, quiet=True) as screen, suppress(Enough), files_metered(watch):
            if profiler:
                profiler.enable()
            try:
                virtually(train(run, screen))
            finally:
                if profiler:
                    profiler.disable()
        if profiler and profile:
            profiler.dump_stats(profile)
        summary = json.loads((run.directory / "summary.json").read_text()) if not s.measured else None
    found = {"setting": asdict(s), **measured(s, watch.readings)}
    return found | ({"groups": summary["groups"], "max_lag": summary["max_lag"]} if summary else {})


@contextmanager
def files_metered(watch: Watch) -> Iterator[None]:
    """Count the run's files (journal, trajectories, metrics) apart: they grow with tokens, not with engines.

    There are no event files of curves: their writer has a thread of its own.
    """
    from relax_core.journal import Journal
    from relax_core.storage import Storage
    from relax_core.trajectories import TrajectoryFiles

    def timed(cls: type, name: str) -> Any:
        inner = getattr(cls, name)

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            meter: Meter = watch.meter
            with meter("files"):
                return inner(self, *args, **kwargs)

        return mock.patch.object(cls, name, outer)

    no_curves = mock.patch("relax_core.storage.EventFiles")
    with timed(Journal, "write"), timed(TrajectoryFiles, "write"), timed(Storage, "log"), no_curves:
        yield


def measured(s: Setting, readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rates, shares and CPU time between the last step of warm-up and the last one."""
    first, last = readings[s.warmup - 1 if s.measured else 0], readings[-1]
    seconds = last["virtual_s"] - first["virtual_s"]
    steps, rows = last["step"] - first["step"], last["rows"] - first["rows"]
    elsewhere = {k: v - first["elsewhere"].get(k, 0.0) for k, v in last["elsewhere"].items()}
    cpu = last["cpu_s"] - first["cpu_s"]
    lags = {lag: n - first["lags"].get(lag, 0) for lag, n in sorted(last["lags"].items())}
    tokens = sum(lags.values())
    window = readings[readings.index(first) + 1 :]
    return {
        "steps_per_h": 3600 * steps / seconds,
        "rows_per_s": rows / seconds,
        "engine_idle": 1 - (last["engines_busy_s"] - first["engines_busy_s"]) / (seconds * s.engines),
        "trainer_wait": 1 - (last["trainer_busy_s"] - first["trainer_busy_s"]) / seconds,
        "lags": {str(lag): n / tokens for lag, n in lags.items() if n},
        "length_trained": sum(r["length_trained"] for r in window) / len(window),
        "control_us_per_row": 1e6 * (cpu - sum(elsewhere.values())) / rows,
        "elsewhere_us_per_row": {name: 1e6 * value / rows for name, value in elsewhere.items()},
        "step_ends_s": [r["virtual_s"] for r in readings],
        "rows": rows,
    }
