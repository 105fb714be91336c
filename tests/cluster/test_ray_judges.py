"""Judges on a cluster: graders ask the run's engine, or one of their own, and judge as one process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from relax_core.hookspecs import Callback, StepEnd
from relax_core.run import Run
from relax_core.testing.runs import TEXT_RUN, WORDS, accounted, metrics, run_file, summary, train
from relax_plugin_ray.runtime import RayRuntime

SIZE = {"hidden": 32, "layers": 1, "unknown_words": "keep"}
DIGITS = ["0", "1", "2", "3", "4", "5"]
VOTES = {"id": "genrm", "scale": [0, 5], "votes": 4, "temperature": 1.0, "max_new_tokens": 2, "min_read": 0.1}
SHARED = {**VOTES, "placement": "shared", "weight": 0.1}
OWN = {**VOTES, "placement": "own", "model": {"id": "text", "tiny": {"words": DIGITS, **SIZE}}, "weight": 0.1}
JUDGED = "environments/last-word/play/genrm/judgements"
FAILED = "environments/last-word/play/genrm/unread/failed"


def file(folder: Path, judge: dict[str, Any], **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "plugins": ["genrm", "ray"],
        "steps": 3,
        "model": {"id": "text", "tiny": {"words": ["last", "of", "?", *WORDS, *DIGITS], **SIZE}},
        "rewards": [*TEXT_RUN["rewards"], judge],
    }
    return run_file(folder, **settings | changes)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("judge", [SHARED, OWN], ids=["shared", "own"])
def test_graders_judge_as_one_process_does(cluster: str, tmp_path: Path, judge: dict[str, Any]) -> None:
    here = train(file(tmp_path / "here", judge))
    there = train(file(tmp_path / "there", judge, runtime={"id": "ray"}))
    assert metrics(there) == metrics(here)
    assert all(line[JUDGED] == 4 for line in metrics(there) if "reward" in line)


@pytest.mark.timeout(180)
def test_the_policy_judges_while_it_trains_and_when_its_engine_dies(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous and colocated; the engine of plays and judgements is killed, and both are asked of the next one."""
    runtimes: list[RayRuntime] = []
    build = RayRuntime.__init__

    def note(self: RayRuntime, config: Any) -> None:
        build(self, config)
        runtimes.append(self)

    monkeypatch.setattr(RayRuntime, "__init__", note)

    class Kill(Callback):
        def on_step_end(self, run: Run, event: StepEnd) -> None:
            if event.step == 1:
                os.kill(ray.get(runtimes[-1].actors()["engine-0"].pid.remote()), signal.SIGKILL)

    runtime = {"id": "ray", "placement": "colocate"}
    path = file(tmp_path, SHARED, runtime=runtime, max_staleness=2, steps=5, evaluation=[])
    directory = train(path, callback=Kill())
    steps = [line for line in metrics(directory) if "reward" in line]
    assert len(steps) == 5 and all(line[JUDGED] == 4 and line[FAILED] == 0 for line in steps)
    assert accounted(summary(directory)["groups"])
