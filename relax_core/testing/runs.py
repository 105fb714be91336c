"""Whole small runs for tests: a run file that trains in seconds, trained here or in a child that may be killed."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from relax_core.metrics import comparable

if TYPE_CHECKING:
    from relax_core.hookspecs import Callback

WORDS = ("cat", "dog", "sun", "moon", "tree", "fish", "bird", "star", "rain", "fire")

TEXT_RUN: dict[str, Any] = {
    "name": "tiny",
    "steps": 6,
    "groups_per_step": 4,
    "group_size": 4,
    "model": {
        "id": "text",
        "tiny": {
            "words": ["last", "of", "?", *WORDS],
            "hidden": 32,
            "layers": 1,
        },
    },
    "environments": [{"id": "last-word"}],
    "rewards": [{"id": "exact", "weight": 0.8}, {"id": "format", "weight": 0.2, "words": 1, "ended": True}],
    "algorithm": {"id": "grpo", "entropy": {"start": 0.15, "end": 0.02, "steps": 100}},
    "sampling": {"max_new_tokens": 3},
    "trainer": {"lr": 1e-3},
    "evaluation": [{"name": "held-out", "environment": "last-word", "size": 16, "every": 3}],
    "checkpoint": {"every": 2},
}
"""A text run of some seconds; change copies of it by ``run_file``."""


def run_file(folder: Path, **changes: Any) -> Path:
    """Write ``TEXT_RUN`` with changed top-level fields; its run directory is ``folder/runs/<name>``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(copy.deepcopy(TEXT_RUN) | {"runs": str(folder / "runs")} | changes, sort_keys=False))
    return path


def train(
    path: Path,
    overrides: Sequence[str] = (),
    installed: Sequence[EntryPoint] | None = None,
    callback: Callback | None = None,
) -> Path:
    """Train quietly in this process, as ``relax train`` does; the run's directory. ``callback``: one more, here."""
    from relax_core.launch import prepare
    from relax_core.screen import Screen
    from relax_core.train import run_training

    run = prepare(path, overrides, report=lambda line: None, installed=installed)
    if callback is not None:
        run.stack.add_callback(callback, "callbacks.test")
    with Screen(run, quiet=True) as screen:
        run_training(run, screen)
    return run.directory


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without what depends on time."""
    return [comparable(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def summary(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


@dataclass(frozen=True)
class FinishedRun:
    """What a run has left in its directory."""

    directory: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """See ``metrics``."""
        return metrics(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.directory)

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        """What was played, step by step, as the trajectory files have it."""
        files = sorted((self.directory / "trajectories").glob("step-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def accounted(groups: Mapping[str, int]) -> bool:
    """The accounting identity."""
    ended = ("trained", "filtered", "failed", "dropped", "in_flight")
    return groups["issued"] == sum(groups[name] for name in ended)


def in_child(
    work: Callable[[], object],
    kill_after_s: float | None = None,
    kill_when: Callable[[], bool] = lambda: True,
    limit_s: float = 120.0,
) -> int:
    """Run ``work`` in a forked child (so that imports are paid once); its exit code, or minus the signal that ended it.

    ``kill_after_s``: SIGKILL it so long after ``kill_when`` first held. ``limit_s``: then AssertionError.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    start = time.monotonic()
    armed: float | None = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        elapsed = time.monotonic() - start
        if kill_after_s is not None:
            armed = elapsed if armed is None and kill_when() else armed
            if armed is not None and elapsed - armed >= kill_after_s:
                os.kill(child, signal.SIGKILL)
        if elapsed > limit_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child did not end within {limit_s} s")
        time.sleep(0.005)
