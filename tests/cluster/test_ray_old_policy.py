"""The old policy in processes of its own: tokens and losses are those of a run in one process, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml

from relax_core.config.resolve import resolve, resolved
from relax_core.errors import RelaxError
from relax_core.hookspecs import BatchReady, Callback
from relax_core.interfaces import Row, Trainer
from relax_core.replay import main as replay
from relax_core.run import Run, build_environments
from relax_core.setup import TrainerSetup
from relax_core.testing.runs import accounted, metrics, summary, train
from relax_core.transports import SharedTransport
from relax_core.types import Version
from relax_core.weights import WeightUpdate
from relax_plugin_ray.media import SharedMedia
from relax_plugin_ray.old_policy import OldPolicyActor, RemoteOldPolicy
from relax_plugin_ray.plays import actor_of
from relax_plugin_ray.worker import adapter_of

pytestmark = pytest.mark.timeout(150)

RUN: dict[str, Any] = {
    "name": "old",
    "plugins": ["omni", "ray"],
    "steps": 3,
    "groups_per_step": 4,
    "group_size": 4,
    "updates_per_step": 2,
    "model": {
        "id": "qwen3-omni",
        "tiny": {"words": ["what", "which", "colour", "tone", "?", "red", "green", "blue", "yellow", "high", "low"]},
    },
    "environments": [{"id": "colour"}, {"id": "tone"}],
    "rewards": [{"id": "exact"}],
    "algorithm": {"id": "grpo", "entropy": {"start": 0.1, "end": 0.0, "steps": 10}},
    "sampling": {"max_new_tokens": 3},
    "trainer": {"id": "torch", "lr": 1e-2, "eps": 1e-2, "device": "cpu", "tokens_per_micro_batch": 64},
}
"""Questions about pictures and sounds, with a policy that moves far in each update."""


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"runs": str(folder / "runs")} | changes))
    return path


def sampled(directory: Path) -> dict[str, list[list[int]]]:
    """The tokens of every trajectory, by group and member."""
    files = sorted((directory / "trajectories").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {f"{line['group']} {line['member']}": [one["ids"] for one in line["samples"]] for line in lines}


def assert_alike(directory: Path, local: Path) -> None:
    assert sampled(directory) == sampled(local) and len(sampled(local)) == RUN["steps"] * 16
    for one, other in zip(metrics(local), metrics(directory), strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert one["reward"] == other["reward"] and one["train/updates"] == other["train/updates"] == 2


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return train(written(tmp_path_factory.mktemp("local")))


def test_tokens_and_losses_are_those_of_one_process(cluster: str, local: Path, tmp_path: Path) -> None:
    directory = train(written(tmp_path, runtime={"id": "ray"}))
    assert_alike(directory, local)
    assert (directory / "logs" / "old_policy-0.log").exists()
    assert replay(directory, 2) == 0, "a replay asks group by group, too, and is equal to the last bit"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_that_is_killed_while_it_computes_changes_nothing(
    cluster: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step, with groups to compute; the one in its place must have that step's weights."""
    from relax_plugin_ray.runtime import RayRuntime

    runtimes: list[RayRuntime] = []
    begin = RayRuntime.start

    async def start(self: RayRuntime, *arguments: Any, **more: Any) -> Any:
        runtimes.append(self)
        return await begin(self, *arguments, **more)

    monkeypatch.setattr(RayRuntime, "start", start)
    killed = []

    class Killer(Callback):
        def on_batch_ready(self, run: Run, event: BatchReady) -> None:
            if event.step == 1:
                os.kill(pid_of(runtimes[0].actors()["old_policy-0"]), signal.SIGKILL)
                killed.append(event.step)

    directory = train(written(tmp_path, runtime={"id": "ray"}), callback=Killer())
    assert killed == [1]
    assert_alike(directory, local)


@pytest.mark.slow
def test_an_asynchronous_run_waits_for_its_own_version(cluster: str, tmp_path: Path) -> None:
    directory = train(written(tmp_path, runtime={"id": "ray"}, max_staleness=2, steps=8))
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] == 32 and found["groups"]["evicted"] == 0
    assert 0 < found["max_lag"] <= 2
    # Before the first update of a step the ratio is one: the old log-probs are of the very policy that is trained.
    assert all(np.isfinite(line["train/loss"]) and line["train/updates"] == 2 for line in metrics(directory))


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


# --- replicas ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class World:
    """A run with what this process has of it."""

    run: Run
    plain: dict[str, Any]
    media: SharedMedia
    trainer: Trainer
    rows: list[Row]
    notes: list[str]

    def old_policy(self, replicas: int = 1, restarts: int = 3) -> RemoteOldPolicy:
        def create(index: int) -> Any:
            return actor_of(OldPolicyActor, num_cpus=0.5)(self.plain, f"old_policy-{index}")

        return RemoteOldPolicy(create, replicas, restarts, self.notes.append, self.media)

    async def own(self) -> list[Any]:
        return [c["logprobs"] for c in await self.trainer.forward(self.rows, frozenset({"logprobs"}))]


@pytest.fixture(scope="module")
def world(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("replicas")
    config, stack = resolve(RUN | {"runs": str(folder), "runtime": {"id": "ray"}})
    run = Run(config, folder / "old", stack)
    adapter, media = adapter_of(run)
    trainer = stack.build("trainers", config.trainer, TrainerSetup(adapter, run), where="trainer")
    rng = np.random.default_rng(0)
    words = [i for i in range(adapter.vocab_size) if i not in adapter.banned_token_ids]
    rows, keys = [], []
    for g, (name, env) in enumerate(build_environments(run).items()):
        prompt = adapter.encode(list(next(iter(env.tasks("train"))).messages))
        keys += [ref.key for ref in prompt.media]
        media.retain(keys[-len(prompt.media) :])
        for m in range(3):
            rows.append(row_of(f"{name}{g}/{m}/0", prompt, rng.choice(words, 2 + m)))
    yield World(run, resolved(config, stack), media, trainer, rows, [])
    media.release(keys)


def row_of(id: str, prompt: Any, reply: Any) -> Row:
    ids = np.array([*prompt.ids, *reply], np.int32)
    sampled = np.arange(len(ids)) >= len(prompt.ids)
    after = int(prompt.positions.max()) + 1 + np.arange(len(reply), dtype=np.int32)
    columns = {
        "tokens": ids,
        "mask": sampled.astype(np.int8),
        "positions": np.concatenate([prompt.positions, np.broadcast_to(after, (3, len(reply)))], 1),
        "media": tuple(prompt.media),
        "group": lambda: "must never be asked for",
    }
    return Row(id, id.split("/")[0], columns)


def published(world: World, transport: SharedTransport, number: int) -> WeightUpdate:
    import torch

    with torch.no_grad():
        for _, tensor in world.trainer.weights():
            tensor += 0.01
    return transport.publish(Version(0, number), world.trainer.weights(), world.trainer.frozen_names())


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def assert_same(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted)
    for columns, own in zip(found, wanted, strict=True):
        assert np.abs(columns["logprobs"] - own).max() < 1e-5 and np.abs(own).max() > 0.1


@pytest.mark.slow
def test_replicas_hold_one_version_through_deaths(world: World) -> None:
    async def test() -> None:
        old, transport = world.old_policy(replicas=2), SharedTransport(SharedTransport.Config())
        await old.pool.start(100)
        early = asyncio.ensure_future(old.forward(world.rows, Version(0, 0)))
        await asyncio.sleep(0.2)
        assert not early.done(), "nothing is published yet"
        await old.load_weights(published(world, transport, 0))
        assert_same(await early, await world.own())

        # Another version than the loaded one is refused by the replica itself, in its words.
        with pytest.raises(
            RelaxError, match=r"old policy: asked for log-probs under version 0 .*, it holds version 1 "
        ):
            await old.load_weights(published(world, transport, 1))
            await old.forward(world.rows, Version(0, 0))

        # One dies before it can load: the one in its place has the newest weights, and no other.
        os.kill(pid_of(old.pool.actors[1]), signal.SIGKILL)
        await old.load_weights(published(world, transport, 2))
        wanted = await world.own()
        for found in await old.pool.all(lambda actor: compute(actor, old, world)):
            assert_same(found, wanted)

        # One dies while it computes: its calls are made again.
        pids = [pid_of(actor) for actor in old.pool.actors]
        calls = [asyncio.ensure_future(old.forward(world.rows, Version(0, 2))) for _ in range(8)]
        await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        for found in await asyncio.gather(*calls):
            assert_same(found, wanted)
        assert len(world.notes) == 2 and world.notes[0].startswith("old_policy 1 died (")
        old.pool.stop()
        transport.close()

    run(test)


async def compute(actor: Any, old: RemoteOldPolicy, world: World) -> Any:
    """With this replica."""
    from relax_plugin_ray.rows import packed

    return await actor.forward.remote(packed(world.rows, world.media), Version(0, 2))


@pytest.mark.slow
def test_one_that_cannot_be_built_says_why(world: World) -> None:
    broken = world.plain | {"plugins": []}

    async def test() -> None:
        old = replace(world, plain=broken).old_policy()
        with pytest.raises(RelaxError, match="qwen3-omni"):
            await old.pool.start(100)
        old.pool.stop()

    run(test)
