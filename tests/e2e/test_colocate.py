"""Engine and trainer that take turns on one device train the same as those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.testing.runs import accounted, metrics, run_file, summary, train
from relax_core.torch.engine import TorchEngine
from relax_core.torch.trainer import TorchTrainer

SHARED = {"id": "local", "placement": "colocate"}


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who sleeps and wakes, in order."""
    found: list[str] = []
    for kind, who in ((TorchEngine, "engine"), (TorchTrainer, "trainer")):
        for what in ("sleep", "wake"):
            watch(monkeypatch, kind, what, f"{who} {what}s", found)
    return found


def watch(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, said: str, found: list[str]) -> None:
    real = getattr(kind, name)

    async def watched(self: Any) -> None:
        found.append(said)
        await real(self)

    monkeypatch.setattr(kind, name, watched)


def test_turns_change_nothing_in_a_synchronous_run(tmp_path: Path, turns: list[str]) -> None:
    resident = metrics(train(run_file(tmp_path / "resident")))
    assert not turns
    shared = metrics(train(run_file(tmp_path / "shared", runtime=SHARED)))
    assert shared == resident
    turn = ["engine sleeps", "trainer wakes", "trainer sleeps", "engine wakes"]
    assert turns == ["trainer sleeps", *turn * 2, *turn * 6]  # the probe's, and those of six steps


@pytest.mark.parametrize("changes", [{"updates_per_step": 2}, {"algorithm": {"id": "grpo", "whiten": True}}], ids=str)
def test_steps_that_look_at_all_groups_first_take_turns_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    resident = metrics(train(run_file(tmp_path / "resident", **changes)))
    assert metrics(train(run_file(tmp_path / "shared", runtime=SHARED, **changes))) == resident


@pytest.mark.parametrize("settings", [{}, {"whiten": False}, {"kl": {"coefficient": 0.1}}], ids=str)
def test_a_critic_takes_its_turn_with_the_trainer(tmp_path: Path, turns: list[str], settings: dict[str, Any]) -> None:
    """Its values are made when all plays are there; they are those that a stage would have made."""
    changes = {"algorithm": {"id": "ppo", **settings}, "evaluation": [], "steps": 3}
    resident = metrics(train(run_file(tmp_path / "resident", **changes)))
    assert not turns
    assert metrics(train(run_file(tmp_path / "shared", runtime=SHARED, **changes))) == resident
    assert turns.count("trainer wakes") == 2 * turns.count("engine sleeps") == 2 * (2 + 3)  # two learners; probe, steps


def test_what_sleep_interrupts_is_sampled_on(tmp_path: Path) -> None:
    """At max_staleness 2 plays of later steps are under way when the trainer takes the device."""
    found = summary(train(run_file(tmp_path, steps=12, runtime=SHARED, max_staleness=2, evaluation=[])))
    assert accounted(found["groups"]) and found["groups"]["trained"] == 48
    assert found["groups"]["failed"] == found["groups"]["evicted"] == 0 and 0 < found["max_lag"] <= 2


def test_a_run_that_takes_turns_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = run_file(tmp_path, runtime=SHARED, evaluation=[])
    train(path, ["steps=4"])
    whole = train(run_file(tmp_path / "whole", runtime=SHARED, evaluation=[]))
    assert metrics(train(path, ["steps=6"])) == metrics(whole)
