"""Every algorithm learns a toy: repeat the one word of the prompt; four updates a step let its clip or weight act."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.interfaces import Algorithm
from relax_core.plugins import activate, installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import WORDS, accounted, metrics, run_file, summary, train

ECHO = f'''
"""Ten tasks: say the word."""
from relax_core.interfaces import Component, Environment
from relax_core.types import Task, user


class Echo(Environment):
    def tasks(self, split):
        return [Task(word, (user(f"last of {{word}} ?"),), word) for word in {WORDS!r}]


def relax_environments():
    return {{"echo": Component("echo_plugin:Echo")}}
'''
EXTRA = ("algorithms-extra",)
FAST = ("grpo", "ppo", "gspo")
"""Run by make test; all others by make test-slow."""
BUDGET = 50
"""Steps of ten groups of eight one-word replies."""
SETTINGS: dict[str, dict[str, Any]] = {
    "dr-grpo": {"constant": 1},
    "opd": {"reward_weight": 1.0, "weight": 0.1},
    "dppo": {"delta": 0.02},  # probabilities of a toy move little
}
"""What an algorithm needs set."""
RUN: dict[str, dict[str, Any]] = {
    "m2po": {"max_staleness": 2},  # it leaves out what is stale
    "opd": {
        "stages": [
            {"id": "teacher", "model": {"id": "text", "tiny": {"words": ["last", "of", "?", *WORDS], "seed": 1}}}
        ]
    },
}


def ids() -> list[Any]:
    known = activate(EXTRA).components("algorithms")
    return [id if id in FAST else pytest.param(id, marks=pytest.mark.slow) for id in known]


def learn(folder: Path, monkeypatch: pytest.MonkeyPatch, id: str, **changes: Any) -> Path:
    """Train the toy; the run's directory."""
    installed = installed_plugins()
    write_plugin(folder / "plugins", "echo", ECHO)
    monkeypatch.syspath_prepend(str(folder / "plugins"))
    monkeypatch.delitem(sys.modules, "echo_plugin", raising=False)
    settings: dict[str, Any] = {
        "plugins": [*EXTRA, "echo"],
        "steps": BUDGET,
        "groups_per_step": 10,
        "group_size": 8,
        "environments": [{"id": "echo"}],
        "rewards": [{"id": "exact"}],
        "algorithm": {"id": id, "entropy": {"start": 0.05, "end": 0.01, "steps": 20}, **SETTINGS.get(id, {})},
        "sampling": {"max_new_tokens": 1},
        "trainer": {"lr": 3e-3, "betas": [0.9, 0.95]},
        "evaluation": [],
        "checkpoint": {"every": BUDGET},
        "trajectories": {"every": BUDGET},
    }
    path = run_file(folder, **{**settings, **RUN.get(id, {}), **changes})
    return train(path, installed=(*installed, *plugins_in(folder / "plugins")))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("id", ids())
def test_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id: str) -> None:
    """The mean reward of the last five steps is above 0.8, from about 0.06 at the start."""
    directory = learn(tmp_path, monkeypatch, id, updates_per_step=4)
    lines = [line for line in metrics(directory) if line["kind"] == "train"]
    rewards = [line["reward"] for line in lines]
    assert rewards[0] < 0.3
    assert statistics.fmean(rewards[-5:]) > 0.8, rewards
    assert max(line["train/clipped"] for line in lines) > 0
    assert all(f"train/mismatch/text/{name}" in line for line in lines for name in ("abs", "k3", "clipped"))
    assert accounted(summary(directory)["groups"])


def test_every_algorithm_is_here() -> None:
    known = activate(EXTRA).components("algorithms")
    assert issubclass(activate(()).load("algorithms", "grpo"), Algorithm) and set(FAST) <= set(known)
