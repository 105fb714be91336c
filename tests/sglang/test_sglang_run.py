"""A training run is the same run with the engine ``sglang``: it learns, and engine and trainer agree."""

from __future__ import annotations

import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.hookspecs import Callback
from relax_core.testing.living import living
from relax_core.testing.runs import accounted, run_file, summary, train

STEPS = 24
RUN: dict[str, Any] = {
    "steps": STEPS,
    "groups_per_step": 10,
    "group_size": 6,
    "trainer": {"lr": 5e-3, "dtype": "bfloat16"},
    "evaluation": [],
    "checkpoint": {"every": STEPS},
    "seed": 1,
}


def rewards(directory: Path) -> tuple[float, float]:
    """Of the first and of the last four steps."""
    found = [line["reward"] for line in lines(directory)]
    return statistics.fmean(found[:4]), statistics.fmean(found[-4:])


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


class KillServer(Callback):
    """SIGKILL to SGLang's main process, once, at the first group of a step."""

    def __init__(self, step: int) -> None:
        self.step, self.now, self.killed = step, 0, False
        self.others = set(psutil.Process().children(recursive=True))
        """Servers of other tests."""

    def on_step_start(self, run: Any, event: Any) -> None:
        self.now = event.step

    def on_group_start(self, run: Any, event: Any) -> None:
        if self.now == self.step and not self.killed:
            children = set(living("serve.py")) - self.others
            (server,) = [p for p in children if any("serve.py" in word for word in p.cmdline()[:3])]  # no guard
            os.kill(server.pid, signal.SIGKILL)
            self.killed = True


@pytest.mark.timeout(400)
def test_the_same_run_learns_with_both_engines_and_survives_a_killed_server(python: Path, tmp_path: Path) -> None:
    engine = {"id": "torch", "device": "cpu", "dtype": "bfloat16"}
    one = train(run_file(tmp_path / "torch", **RUN, engine=engine))
    kill = KillServer(STEPS // 2)
    engine = {"id": "sglang", "python": str(python), "device": "cpu"}
    other = train(run_file(tmp_path / "sglang", **RUN, engine=engine, plugins=["sglang"]), callback=kill)
    assert kill.killed

    for directory in (one, other):
        first, last = rewards(directory)
        assert last > first + 0.12, (directory, first, last)
    difference = [line["train/mismatch/abs"] for line in lines(other)]
    assert max(difference) < 0.01, difference
    assert min(difference) > 0, "engine and trainer compute differently: not a single difference is no measurement"

    gauges = [line["time/engine/restarts"] for line in lines(other)]
    assert gauges[0] == 0 and gauges[-1] == 1
    assert lines(other)[-1]["time/engine/server/num_requests_total"] > 0
    groups = summary(other)["groups"]
    assert accounted(groups) and groups["trained"] == STEPS * RUN["groups_per_step"] and not groups["failed"]
    assert (other / "logs" / "engine-server.log").stat().st_size > 0
