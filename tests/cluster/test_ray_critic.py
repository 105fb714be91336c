"""The critic as a role: processes of its own, the losses and checkpoints of a local run, ranks, and deaths."""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import RelaxError
from relax_core.testing.runs import accounted, metrics, run_file, summary, train
from relax_plugin_ray.runtime import RayRuntime
from relax_plugin_ray.trainer import TrainerGroup

PPO: dict[str, Any] = {
    "algorithm": {"id": "ppo"},
    "trainer": {"lr": 3e-3, "critic": {"lr": 3e-3}},
    "evaluation": [],
    "checkpoint": {"every": 1},
}
RAY: dict[str, Any] = {"plugins": ["ray"], "runtime": {"id": "ray"}}


@pytest.mark.timeout(120)
def test_a_critic_in_its_own_process_gives_the_local_metrics(cluster: str, tmp_path: Path) -> None:
    """Three steps on the cluster from a local run's checkpoint, and a local one from theirs: as if never moved."""
    expected = metrics(train(run_file(tmp_path / "local", steps=5, **PPO)))
    for steps, where in ((1, {}), (4, RAY), (5, {})):
        directory = train(run_file(tmp_path / "moved", steps=steps, **PPO | where))
        (directory / "config.yaml").unlink()  # it would refuse another runtime
    found = metrics(directory)
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("train/loss", "train/critic_loss", "train/value_loss", "train/value", "reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert found == expected
    assert (directory / "logs" / "critic-0.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_ranks_of_a_critic_learn_asynchronously(cluster: str, tmp_path: Path) -> None:
    """Two ranks, beside one of the policy: the critic learns what replies are worth, and no group is lost."""
    roles = {"critic": {"ranks": 2}}
    changes = {"steps": 16, "max_staleness": 1, "rewards": [{"id": "format", "words": 3}], "checkpoint": {"every": 8}}
    directory = train(
        run_file(tmp_path, **PPO | {"plugins": ["ray"], "runtime": {"id": "ray", "roles": roles}} | changes)
    )
    losses = [line["train/value_loss"] for line in metrics(directory)]
    assert statistics.fmean(losses[-4:]) < 0.25 * statistics.fmean(losses[:4])
    assert accounted(summary(directory)["groups"])
    assert {path.name for path in (directory / "logs").glob("critic-*")} == {"critic-0.log", "critic-1.log"}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_colocated_critic_takes_turns(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two ranks sleep while the engine samples; values made in the step are those of a stage."""
    counted: list[dict[str, int]] = []
    stop = RayRuntime.stop

    async def counting(self: RayRuntime) -> None:
        for group in self._trainers:
            counted.extend(await group.counters())
        await stop(self)

    monkeypatch.setattr(RayRuntime, "stop", counting)
    runtime = {"id": "ray", "placement": "colocate", "roles": {"critic": {"ranks": 2}}}
    expected = metrics(train(run_file(tmp_path / "local", steps=3, **PPO)))
    found = metrics(train(run_file(tmp_path / "shared", steps=3, **PPO | {"plugins": ["ray"], "runtime": runtime})))
    assert len(found) == len(expected) == 3
    assert [(rank["sleeps"], rank["wakes"]) for rank in counted] == [(6, 5)] * 3  # asleep at first; probe, steps
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("train/loss", "train/critic_loss", "train/value_loss", "train/value", "reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_dead_rank_of_the_critic_ends_the_run(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the step that it was killed in, with its name; the policy's ranks do not hold the end up."""
    real = TrainerGroup.step

    async def step(self: TrainerGroup, number: int, *arguments: Any) -> Any:
        if self._role == "critic" and number == 1:
            os.kill((await self.counters())[0]["pid"], signal.SIGKILL)
        return await real(self, number, *arguments)

    monkeypatch.setattr(TrainerGroup, "step", step)
    with pytest.raises(RelaxError, match=r"critic rank 0 died .*goes on from the newest checkpoint"):
        train(run_file(tmp_path, steps=3, **PPO | RAY))
