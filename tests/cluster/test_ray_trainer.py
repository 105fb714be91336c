"""Trainer ranks in actors: the bits of the trainer in this process, rows from the bus, checkpoints, and deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
import torch

from relax_core.config.resolve import resolve, resolved
from relax_core.errors import DataError, RelaxError
from relax_core.interfaces import Algorithm, Cut, ModelAdapter, Row, StepResult, Trainer
from relax_core.plan import plan
from relax_core.run import Run, build_algorithm, build_environments
from relax_core.setup import TrainerSetup
from relax_core.types import Version
from relax_plugin_ray.bus import RayBus
from relax_plugin_ray.media import SharedMedia
from relax_plugin_ray.rank import CALLBACKS, RankActor
from relax_plugin_ray.references import Packed
from relax_plugin_ray.trainer import TrainerGroup
from relax_plugin_ray.worker import adapter_of

pytestmark = pytest.mark.timeout(150)

T = TypeVar("T")
STEPS, GROUPS, MEMBERS = 3, 3, 4
WORDS = ("what", "which", "colour", "tone", "?", "red", "green", "blue", "yellow", "high", "low")
PLUGIN = '''
"""A callback that counts what happens on its rank, and leaves a file when training has begun."""
from pathlib import Path

from relax_core.hookspecs import Callback
from relax_core.interfaces import Component, ComponentConfig


class Count(Callback):
    class Config(ComponentConfig):
        begun: str

    def __init__(self, config):
        self.begun, self.counts = Path(config.begun), {"forwards": 0, "updates": 0}

    def after_forward(self, run, value, event):
        self.begun.touch()
        self.counts["forwards"] += 1
        return value

    def before_optimizer_step(self, run, event):
        self.counts["updates"] += 1

    def state_dict(self):
        return self.counts

    def load_state_dict(self, state):
        self.counts = state


def relax_callbacks():
    return {"count": Component("count_plugin:Count")}
'''
RUN: dict[str, Any] = {
    "name": "ranks",
    "plugins": ["omni", "count"],
    "steps": 10,
    "groups_per_step": GROUPS,
    "group_size": MEMBERS,
    "model": {"id": "qwen3-omni", "tiny": {"words": list(WORDS)}},
    "environments": [{"id": "colour"}, {"id": "tone"}],
    "rewards": [{"id": "exact"}],
    "algorithm": {"id": "grpo", "entropy": {"start": 0.1, "end": 0.0, "steps": 10}},
    "trainer": {"id": "torch", "lr": 1e-2, "eps": 1e-2, "device": "cpu", "tokens_per_micro_batch": 40},
}


@dataclass(frozen=True, slots=True)
class World:
    """A run with all that this process has of it."""

    run: Run
    plain: dict[str, Any]
    adapter: ModelAdapter
    media: SharedMedia
    algorithm: Algorithm
    begun: Path

    def group(self, size: int) -> TrainerGroup:
        actor = ray.remote(RankActor).options(num_cpus=0.5)

        def create(rank: int) -> Any:
            return actor.remote(self.plain, f"trainer-{rank}", rank, size)

        return TrainerGroup(create, size, self.media, start_s=100, patience_s=60)

    def local(self) -> Trainer:
        setup = TrainerSetup(self.adapter, self.run, self.algorithm.outputs)
        trainer: Trainer = self.run.stack.build("trainers", self.run.config.trainer, setup, where="trainer")
        return trainer

    def groups(self, step: int) -> list[list[Row]]:
        """Rows of pictures and sounds, some with no sampled token or no weight."""
        rng = np.random.default_rng(step)
        words = [i for i in range(self.adapter.vocab_size) if i not in self.adapter.banned_token_ids]
        tasks = [list(env.tasks("train")[step : step + GROUPS]) for env in build_environments(self.run).values()]
        return [
            [self._row(f"s{step}g{g}/{m}/0", tasks[g % 2][g].messages, rng, words) for m in range(MEMBERS)]
            for g in range(GROUPS)
        ]

    def _row(self, id: str, messages: Any, rng: np.random.Generator, words: Sequence[int]) -> Row:
        prompt = self.adapter.encode(list(messages))
        reply = rng.choice(words, int(rng.integers(1, 5)))
        ids = np.array([*prompt.ids, *reply], np.int32)
        sampled = np.arange(len(ids)) >= len(prompt.ids)
        positions = prompt.positions
        assert positions is not None
        after = int(positions.max()) + 1 + np.arange(len(reply), dtype=np.int32)
        columns = {
            "tokens": ids,
            "mask": sampled.astype(np.int8),
            "logprobs": np.where(sampled, -1.5, 0).astype(np.float32),
            "versions": np.where(sampled, 0, -1).astype(np.int32),
            "positions": np.concatenate([positions, np.broadcast_to(after, (3, len(reply)))], 1),
            "media": tuple(prompt.media),
            "advantages": np.where(sampled, rng.normal(), 0).astype(np.float32),
            "weight": float(rng.random() > 0.2),
            "units": float(len(reply)),
            "group": lambda: "must never be asked for",
        }
        return Row(id, id.split("/")[0], columns)


@pytest.fixture(scope="module")
def world(cluster: str, install: Callable[[str, str], None], tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("ranks")
    install("count", PLUGIN)
    begun = folder / "begun"
    raw = RUN | {"runs": str(folder), "callbacks": [{"id": "count", "begun": str(begun)}]}
    config, stack = resolve(raw)
    run = Run(config, folder / config.name, stack)
    adapter, media = adapter_of(run)
    return World(run, resolved(config, stack), adapter, media, build_algorithm(run), begun)


class Live:
    """A group that serves the tests of a size, on one event loop."""

    def __init__(self, world: World, size: int) -> None:
        self.world, self.group = world, world.group(size)
        self.runner = asyncio.Runner()
        self.do(self.group.start(), 110)

    def do(self, work: Coroutine[Any, Any, T], limit_s: float = 30) -> T:
        return self.runner.run(asyncio.wait_for(work, limit_s))

    def close(self) -> None:
        self.do(self.group.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def two(world: World) -> Iterator[Live]:
    live = Live(world, 2)
    yield live
    live.close()


@pytest.fixture(scope="module")
def one(world: World) -> Iterator[Live]:
    live = Live(world, 1)
    yield live
    live.close()


async def given(groups: Sequence[Sequence[Row]]) -> AsyncIterator[Sequence[Row]]:
    for rows in groups:
        yield rows


async def trained(trainer: Trainer, step: int, groups: Sequence[Sequence[Row]], algorithm: Algorithm) -> StepResult:
    return await trainer.step(step, plan(given(groups), trainer, 1, 1, len(groups)), algorithm)


CREDIT = ("advantages", "weight", "units")


async def put(bus: RayBus, groups: Sequence[Sequence[Row]], media: SharedMedia) -> None:
    """As a process does that plays: with a store of its own, of which nothing is left afterwards."""
    own = SharedMedia({}, max_bytes=1 << 28)
    for key in {ref.key for rows in groups for row in rows for ref in row.columns["media"]}:
        own.put(key, media.get(key))
    bus.media = own
    holder = bus.register("play")
    for serial, rows in enumerate(groups):
        await bus.open_group(rows[0].group, serial, None, holder)
        columns = {row.id: {k: v for k, v in row.columns.items() if k not in CREDIT} for row in rows}
        await bus.put(columns, holder, rows[0].group)
        await bus.close_group(rows[0].group, len(rows), holder)
    bus.media = None


async def bused(bus: RayBus, groups: Sequence[Sequence[Row]], media: SharedMedia) -> list[list[Row]]:
    """The rows as they come from a bus in another process, with their credit as columns of a stage."""
    await put(bus, groups, media)
    bus.media = media
    needs = frozenset({"tokens", "mask", "logprobs", "versions", "positions", "media", "group"})
    claim = await bus.claim("train", needs, len(groups), "group", bus.register("train"), "started", True)
    await bus.ack(claim)
    extra = {row.id: {k: row.columns[k] for k in CREDIT} for rows in groups for row in rows}
    found = [row.having(extra[row.id]) for row in claim.rows]
    assert all(isinstance(row.columns, Packed) and row.columns.attached for row in claim.rows)
    return [[row for row in found if row.group == rows[0].group] for rows in groups]


def equal(a: Trainer, b: Trainer) -> bool:
    ours, theirs = dict(a.weights()), dict(b.weights())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_one_rank_gives_the_bits_of_the_trainer_in_this_process(world: World, one: Live) -> None:
    """Rows of the bus, with media; in several cuts. What is published is what is there."""
    local = world.local()

    async def steps() -> None:
        assert one.group.budget == local.budget
        bus = RayBus.start(1000, 1 << 28, num_cpus=0)
        for step in range(STEPS):
            groups = await bused(bus, world.groups(step), world.media)
            rows = [row for rows in groups for row in rows]
            ours = await one.group.forward(rows, frozenset({"logprobs"}))
            theirs = await local.forward(rows, frozenset({"logprobs"}))
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a["logprobs"], b["logprobs"])
            expected = await trained(local, step, groups, world.algorithm)
            found = await trained(one.group, step, groups, world.algorithm)
            assert found.metrics == expected.metrics and found.updates == expected.updates == 1
            assert [(list(ids), last) for ids, last in found.cuts] == [(list(i), last) for i, last in expected.cuts]
            assert len(found.cuts) > 1
        assert equal(one.group, local)
        update = await one.group.publish(Version(0, STEPS))
        received = dict(update.tensors())  # each is verified against the manifest
        assert update.manifest.version == Version(0, STEPS)
        assert received.keys() == dict(local.weights()).keys()
        assert all(torch.equal(tensor, received[name]) for name, tensor in local.weights())

    one.do(steps(), 60)


def test_training_begins_before_the_plan_is_complete(world: World, one: Live) -> None:
    """And values may be asked for while the plan is waited for."""
    groups = world.groups(5)
    world.begun.unlink(missing_ok=True)

    async def slow() -> AsyncIterator[Cut]:
        yield Cut(groups[0], last=False)
        while not world.begun.exists():
            await asyncio.sleep(0.01)
        found = await one.group.forward(groups[1], frozenset({"logprobs"}))
        assert len(found) == MEMBERS
        yield Cut(groups[1], last=True)

    async def step() -> StepResult:
        return await one.group.step(5, slow(), world.algorithm)

    assert one.do(step()).updates == 1


def test_a_plan_that_fails_leaves_a_trainer_that_works(world: World, one: Live) -> None:
    groups = world.groups(6)

    async def broken() -> AsyncIterator[Cut]:
        yield Cut(groups[0], last=False)
        raise ValueError("the bus is closed")

    async def endless() -> AsyncIterator[Cut]:
        yield Cut(groups[0], last=False)
        await asyncio.Event().wait()

    async def steps() -> StepResult:
        with pytest.raises(ValueError, match="the bus is closed"):
            await one.group.step(6, broken(), world.algorithm)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.group.step(6, endless(), world.algorithm), 0.5)
        return await trained(one.group, 6, groups, world.algorithm)

    assert one.do(steps()).updates == 1


def test_an_error_of_the_trainer_is_the_same_as_in_this_process(world: World, one: Live) -> None:
    [first, *others], *rest = world.groups(7)
    short = first.having({"advantages": np.zeros(2, np.float32), "weight": 1.0})

    async def step(trainer: Trainer) -> str:
        with pytest.raises(DataError, match="'advantages' has shape") as caught:
            await trained(trainer, 7, [[short, *others], *rest], world.algorithm)
        return str(caught.value)

    assert one.do(step(one.group)) == one.do(step(world.local()))


def test_two_ranks_agree_with_one(world: World, two: Live, tmp_path: Path) -> None:
    """And what they save, one goes on from. (AdamW's large eps keeps small gradients small, rounding errors too.)"""
    local = world.local()

    async def steps() -> None:
        assert two.group.budget == 2 * local.budget
        for step in range(STEPS):
            groups = world.groups(step)
            rows = [row for rows in groups for row in rows]
            outputs = frozenset({"logprobs"})
            ours, theirs = await two.group.forward(rows, outputs), await local.forward(rows, outputs)
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)
            expected = await trained(local, step, groups, world.algorithm)
            found = await trained(two.group, step, groups, world.algorithm)
            assert found.updates == expected.updates == 1
            for name in ("loss", "grad_norm", "entropy"):
                assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-6)

    two.do(steps(), 60)
    weights = dict(two.group.weights())
    for name, tensor in local.weights():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5)
    two.group.save(tmp_path / "saved")
    counts = json.loads((tmp_path / "saved" / CALLBACKS).read_text())
    assert counts["callbacks.0"]["updates"] == STEPS and counts["callbacks.0"]["forwards"] >= STEPS
    resumed = world.local()
    resumed.load(tmp_path / "saved")
    assert equal(two.group, resumed)


def test_one_rank_goes_on_from_what_two_saved(world: World, one: Live, two: Live, tmp_path: Path) -> None:
    two.group.save(tmp_path / "saved")
    one.group.load(tmp_path / "saved")
    one.group.save(tmp_path / "again")
    assert (tmp_path / "saved" / CALLBACKS).read_text() == (tmp_path / "again" / CALLBACKS).read_text()
    assert equal(one.group, two.group)
    two.group.load(tmp_path / "again")
    assert equal(one.group, two.group)


def test_ranks_sleep_together(two: Live) -> None:
    two.do(two.group.sleep())
    with pytest.raises(RelaxError, match="sleeps"):
        two.do(two.group.forward(two.world.groups(0)[0], frozenset({"logprobs"})))
    two.do(two.group.wake())
    counters = two.do(two.group.counters())
    assert [(c["sleeps"], c["wakes"]) for c in counters] == [(1, 1)] * 2
    assert len({c["pid"] for c in counters}) == 2


def test_a_rank_that_dies_is_an_error_and_no_hang(two: Live) -> None:
    """Rank 0 waits for a cut, and the controller for the plan: neither of them touches the dead rank."""
    pids = [c["pid"] for c in two.do(two.group.counters())]
    groups = two.world.groups(8)
    killed = 0.0

    async def waiting() -> AsyncIterator[Cut]:
        nonlocal killed
        yield Cut(groups[0], last=False)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.Event().wait()

    async def step() -> None:
        await two.group.step(8, waiting(), two.world.algorithm)

    with pytest.raises(RelaxError, match=r"^trainer rank 1 died"):
        two.do(step())
    assert time.monotonic() - killed < 10
    for work in (two.group.forward(groups[0], frozenset({"logprobs"})), two.group.publish(Version(0, 1))):
        with pytest.raises(RelaxError, match=r"^trainer rank 1 died"):
            two.do(work)
    with pytest.raises(RelaxError, match=r"^trainer rank 1 died"):
        two.group.save(Path("never"))
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pids[0]}").exists():
        assert time.monotonic() < deadline, "rank 0 outlived its group"
        time.sleep(0.05)


def test_a_death_while_this_process_blocks_is_an_error(one: Live, tmp_path: Path) -> None:
    [counters] = one.do(one.group.counters())
    os.kill(counters["pid"], signal.SIGSTOP)  # so that it cannot answer before it dies
    Timer(0.5, os.kill, (counters["pid"], signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(RelaxError, match=r"^trainer rank 0 died"):
        one.group.save(tmp_path / "saved")
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_ranks_that_cannot_be_built_say_why(world: World, cluster: str) -> None:
    plain = world.plain | {"trainer": world.plain["trainer"] | {"frozen": ["nothing*"]}}
    actor = ray.remote(RankActor).options(num_cpus=0.5)
    group = TrainerGroup(lambda rank: actor.remote(plain, f"trainer-{rank}", rank, 1), 1, world.media, start_s=60)
    with pytest.raises(RelaxError, match=r"trainer\.frozen\.0: found 'nothing\*'"):
        asyncio.run(asyncio.wait_for(group.start(), 60))
