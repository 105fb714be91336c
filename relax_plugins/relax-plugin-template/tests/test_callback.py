from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from relax_core.testing.runs import FinishedRun

from relax_plugin_template.callback import Best

pytest_plugins = ["relax_core.testing.fixtures"]


def test_it_takes_part_in_a_run(tiny_run: Callable[..., FinishedRun]) -> None:
    run = tiny_run(plugins=["template"], callbacks=[{"id": "template-best", "metric": "reward"}])
    state = sorted(run.directory.glob("checkpoints/*/state.json"))[-1]
    saved: dict[str, Any] = json.loads(state.read_text())["callbacks"]["callbacks.0"]
    rewards = [line["reward"] for line in run.metrics]
    assert saved == {"best": max(rewards), "step": rewards.index(max(rewards))}


def test_its_state_survives_a_restart() -> None:
    before, after = Best(Best.Config()), Best(Best.Config())
    before.best, before.step = 0.5, 3
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (after.best, after.step) == (0.5, 3)
