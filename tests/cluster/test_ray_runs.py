"""Whole runs on a cluster: equal to local ones, learning, accounted for, and not stopped by what dies."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
import yaml

from relax_core.config.yaml import read
from relax_core.errors import RelaxError
from relax_core.hookspecs import Callback, StepEnd
from relax_core.run import Run
from relax_core.runtime import Roles
from relax_core.testing.runs import accounted, metrics, run_file, summary, train
from relax_plugin_ray.runtime import RayRuntime

T = TypeVar("T")
OMNI = Path(__file__).parents[2] / "configs" / "omni-tiny.yaml"
LEARNING: dict[str, Any] = {"steps": 34, "groups_per_step": 8, "group_size": 16, "checkpoint": {"every": 34}}
"""Of the demo's 400 steps of 256 plays: its reward has come to about a fifth then, from nothing."""
ENCODING = {"numpy", "tokenizers", "transformers"}
COMPUTING = ENCODING | {"torch", "transformers.modeling_utils"}
LOADED = {
    "advantages-0": {"numpy"},
    "bus-0": {"numpy"},
    "engine-0": COMPUTING,
    "environments-0": ENCODING,
    "graders-0": {"numpy"},
    "trainer-0": COMPUTING,
}
"""Of ``COMPUTING``, what each process of a run has imported: it costs time and memory in every process that has it."""
TWO = {"id": "ray", "roles": {"engine": {"replicas": 2}, "trainer": {"ranks": 2}}}


def omni(folder: Path, **changes: Any) -> Path:
    """The demo's run file with other top-level fields."""
    raw = read(OMNI) | {"runs": str(folder / "runs"), "evaluation": []} | changes
    raw["trainer"] = raw["trainer"] | {"schedule": "constant"}
    if "runtime" in changes:
        raw["plugins"] = ["omni", "ray"]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def text(folder: Path, **changes: Any) -> Path:
    return run_file(folder, **({"plugins": ["ray"], "runtime": {"id": "ray"}, "evaluation": []} | changes))


def sampled(directory: Path, steps: int) -> dict[str, list[list[int]]]:
    """The tokens of every trajectory of the first steps, by step and group."""
    found = {}
    for step in range(steps):
        for line in (directory / "trajectories" / f"step-{step:08d}.jsonl").read_text().splitlines():
            one = json.loads(line)
            found[f"{step} {one['group']} {one['member']}"] = [sample["ids"] for sample in one["samples"]]
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of the demo in this process, with one evaluation."""
    small = [{"name": "image", "environment": "image", "size": 16, "at_start": True}]
    return train(omni(tmp_path_factory.mktemp("local"), evaluation=small, **LEARNING | {"steps": 5}))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RayRuntime, Roles]]:
    """Each runtime that is started in the test, with its roles."""
    found: list[tuple[RayRuntime, Roles]] = []
    begin = RayRuntime.start

    async def start(self: RayRuntime, *arguments: Any, **more: Any) -> Roles:
        roles = await begin(self, *arguments, **more)
        found.append((self, roles))
        return roles

    monkeypatch.setattr(RayRuntime, "start", start)
    return found


@pytest.mark.timeout(120)
def test_one_engine_and_one_rank_give_the_local_metrics(
    cluster: str, local: Path, tmp_path: Path, started: list[tuple[RayRuntime, Roles]]
) -> None:
    """And each process imports only what its work needs."""
    loaded: dict[str, set[str]] = {}

    class Look(Callback):
        def on_train_end(self, run: Run) -> None:
            runtime, roles = started[0]
            bus: Any = roles.bus
            trainer: Any = roles.trainer
            actors = runtime.actors() | {"bus-0": bus._actor, "trainer-0": trainer._ranks[0]}
            loaded.update({role: COMPUTING & modules_of(actor) for role, actor in actors.items()})

    small = [{"name": "image", "environment": "image", "size": 16, "at_start": True}]
    path = omni(tmp_path, evaluation=small, runtime={"id": "ray"}, **LEARNING | {"steps": 5})
    directory = train(path, callback=Look())
    assert metrics(directory) == metrics(local) and len(metrics(local)) == 7
    assert sampled(directory, 5) == sampled(local, 5)
    assert loaded == LOADED


@pytest.mark.timeout(180)
def test_two_engines_and_two_ranks_learn_what_one_process_learns(cluster: str, local: Path, tmp_path: Path) -> None:
    """The same tokens and losses in the first steps, and the demo's reward rises."""
    directory = train(omni(tmp_path, runtime=TWO, **LEARNING))
    assert sampled(directory, 5) == sampled(local, 5)
    for one, other in zip(training(local), training(directory)[:5], strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert one["reward"] == other["reward"]
    assert_learned(directory)


@pytest.mark.timeout(180)
def test_two_engines_and_two_ranks_learn_asynchronously(cluster: str, tmp_path: Path) -> None:
    directory = train(omni(tmp_path, runtime=TWO, max_staleness=2, **LEARNING))
    found = summary(directory)
    assert 0 < found["max_lag"] <= 2 and found["groups"]["evicted"] == 0 and accounted(found["groups"])
    lags = {key for line in training(directory) for key in line if key.startswith("lag/tokens/")}
    assert lags == {"lag/tokens/0", "lag/tokens/1", "lag/tokens/2"}
    assert_learned(directory)


def training(directory: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(directory) if line["kind"] == "train"]


def assert_learned(directory: Path) -> None:
    rewards = [line["reward"] for line in training(directory)]
    first, last = statistics.fmean(rewards[:8]), statistics.fmean(rewards[-8:])
    assert last > first + 0.1, (first, last)


@pytest.mark.timeout(60)
def test_finished_order_evicts_the_late_and_shows_the_bias(cluster: str, tmp_path: Path) -> None:
    """Long answers come late here: they are evicted, counted, played again, and missing among what is trained."""
    changes = {"max_staleness": 1, "order": "finished", "environments": [{"id": "uneven"}]}
    directory = train(text(tmp_path, steps=12, **changes, **UNEVEN))
    found = summary(directory)
    groups = found["groups"]
    assert groups["evicted"] > 0 and accounted(groups) and groups["trained"] == 48 and found["max_lag"] <= 1
    assert found["mean_length"]["trained"] < 0.95 * found["mean_length"]["played"]
    last = training(directory)[-1]
    assert last["groups/evicted"] == groups["evicted"]


UNEVEN: dict[str, Any] = {"plugins": ["ray", "cluster_tests"]}


@pytest.mark.timeout(120)
def test_what_dies_is_started_again(cluster: str, tmp_path: Path, started: list[tuple[RayRuntime, Roles]]) -> None:
    """An engine, an environment, a grader and a stage are killed while they work; no group is lost or trained twice."""
    killed: list[str] = []

    class Killer(Callback):
        def on_step_end(self, run: Run, event: StepEnd) -> None:
            if event.step in VICTIMS:
                role = VICTIMS[event.step]
                os.kill(asked(started[0][0].actors()[role], os.getpid), signal.SIGKILL)
                killed.append(role)

    changes = {"runtime": {"id": "ray", "roles": {"engine": {"replicas": 2}}}, "max_staleness": 4}
    directory = train(text(tmp_path, steps=18, **changes), callback=Killer())
    found = summary(directory)
    assert killed == list(VICTIMS.values())
    assert accounted(found["groups"]) and found["groups"]["trained"] == 72
    assert found["groups"]["failed"] == found["groups"]["evicted"] == 0 and 0 < found["max_lag"] <= 4
    entries = [
        json.loads(line)
        for file in sorted((directory / "trajectories").iterdir())
        if file.suffix == ".jsonl"
        for line in file.read_text().splitlines()
    ]
    names = [(one["group"], one["member"]) for one in entries]
    assert len(names) == len(set(names)) == 72 * 4


VICTIMS = {2: "engine-0", 6: "environments-0", 10: "graders-0", 14: "advantages-0"}


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_cores_that_the_machine_has_not_end_the_run_with_their_place(cluster: str, tmp_path: Path, role: str) -> None:
    runtime = {"id": "ray", "roles": {role: {"cores": [[4096]]}}}
    with pytest.raises(RelaxError, match=f"runtime.roles: cores of {role}-0: found 4096; its machine has 0 to"):
        train(text(tmp_path, runtime=runtime))


def asked(actor: Any, what: Callable[[], T]) -> T:
    """What a function gives in an actor's process."""
    found: T = ray.get(actor.__ray_call__.remote(lambda self: what()), timeout=30)
    return found


def modules_of(actor: Any) -> set[str]:
    return set(asked(actor, lambda: list(sys.modules)))
