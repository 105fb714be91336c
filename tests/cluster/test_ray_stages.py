"""Stages in actors: every row gets its column once, whatever dies; errors say what they say in one process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from relax_core.config.resolve import resolve, resolved
from relax_core.errors import PluginError, RelaxError
from relax_core.interfaces import Row
from relax_core.run import Run
from relax_core.types import Version
from relax_core.weights import Manifest, WeightUpdate
from relax_plugin_ray.bus import RayBus
from relax_plugin_ray.media import SharedMedia
from relax_plugin_ray.stages import RemoteStage, StageActor, state_of

Install = Callable[[str, str], None]
pytestmark = pytest.mark.timeout(150)

PLUGIN = '''
"""A stage whose faults are files: ``hold`` makes it wait, ``raise`` makes it fail."""
import asyncio
from pathlib import Path

from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Component, ComponentConfig, Stage
from relax_core.testing.tiny import TinyConfig


class Needy(Grpo):
    needs = frozenset({"made"})


class Maker(Stage):
    name, needs, by, count = "maker", frozenset({"tokens", "media"}), "row", 4

    class Config(ComponentConfig):
        folder: str

    def __init__(self, config, setup):
        self.folder, self.media, self.version = Path(config.folder), setup.media, 0
        if (self.folder / "refuse").exists():
            raise ValueError("no model")

    async def run(self, claim):
        with (self.folder / "claimed").open("a") as file:
            file.write(f"{len(claim.rows)}\\n")
        while (self.folder / "hold").exists():
            await asyncio.sleep(0.01)
        if (self.folder / "raise").exists():
            raise ValueError("out of order")
        return {row.id: {"made": self.of(row)} for row in claim.rows}

    def of(self, row):
        seen = sum(float(self.media.get(ref.key)["pixels"].sum()) for ref in row.columns["media"])
        return row.columns["tokens"] * 2.0 + seen + 1000 * self.version

    async def load_weights(self, update):
        self.version = update.manifest.version.number

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(str(self.version))

    def load(self, folder):
        if (folder / "version").exists():
            self.version = int((folder / "version").read_text())


def relax_models():
    return {"tiny": Component("relax_core.testing.tiny:TinyAdapter", TinyConfig)}


def relax_algorithms():
    return {"needy": Component("maker_plugin:Needy")}


def relax_stages():
    return {"maker": Component("maker_plugin:Maker", Maker.Config, makes=frozenset({"made"}))}
'''
RUN: dict[str, Any] = {
    "name": "staged",
    "plugins": ["maker"],
    "steps": 10,
    "groups_per_step": 2,
    "model": {"id": "tiny", "images": True},
    "environments": [{"id": "last-word"}],
    "rewards": [{"id": "exact"}],
    "algorithm": {"id": "needy"},
}
NEEDS = frozenset({"tokens", "made"})


@dataclass(frozen=True, slots=True)
class World:
    run: Run
    plain: dict[str, Any]
    folder: Path
    notes: list[str]

    def stage(self, bus: RayBus, replicas: int = 1, restarts: int = 3, name: str = "maker") -> RemoteStage:
        actor = ray.remote(StageActor).options(num_cpus=0.5, max_concurrency=100)

        def create(index: int) -> Any:
            return actor.remote(self.plain, f"{name}-{index}", name, bus)

        return RemoteStage(name, create, state_of(self.run, name), replicas, restarts, self.notes.append, 50)

    def faults(self, *names: str) -> None:
        for name in ("hold", "raise", "refuse", "claimed"):
            (self.folder / name).unlink(missing_ok=True)
        for name in names:
            (self.folder / name).touch()

    def claimed(self) -> int:
        file = self.folder / "claimed"
        return len(file.read_text().split()) if file.exists() else 0


@pytest.fixture(scope="module")
def module(cluster: str, install: Install, tmp_path_factory: pytest.TempPathFactory) -> World:
    tmp_path = tmp_path_factory.mktemp("stages")
    install("maker", PLUGIN)
    raw = RUN | {"runs": str(tmp_path), "stages": [{"id": "maker", "folder": str(tmp_path)}]}
    config, stack = resolve(raw)
    return World(Run(config, tmp_path / config.name, stack), resolved(config, stack), tmp_path, [])


@pytest.fixture
def world(module: World) -> World:
    module.faults()
    module.notes.clear()
    return module


def media() -> SharedMedia:
    store = SharedMedia({}, max_bytes=1 << 20)
    store.put("image", {"pixels": np.full(50_000, 0.5, np.float32)})
    store.retain(["image"])
    return store


async def filled(rows: int, store: SharedMedia | None = None) -> RayBus:
    """A bus with one closed group; each row names a medium where there is a store."""
    from relax_core.types import MediaRef

    bus = RayBus.start(1000, 1 << 28, store, num_cpus=0)
    holder = bus.register("rollout")
    await bus.open_group("g", 0, None, holder)
    refs = (MediaRef("image", "image", 0, 1),) if store is not None else ()
    await bus.put({f"g/{i}/0": {"tokens": np.array([i, i + 1]), "media": refs} for i in range(rows)}, holder, "g")
    await bus.close_group("g", rows, holder)
    return bus


async def made(bus: RayBus, rows: int) -> list[Row]:
    claim = await bus.claim("train", NEEDS, 1, "group", bus.register("train"))
    assert len(claim.rows) == rows
    return list(claim.rows)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def version(number: int) -> WeightUpdate:
    return WeightUpdate(Manifest(Version(0, number), ()), None)  # type: ignore[arg-type]  # never read


def pid_of(stage: RemoteStage, replica: int = 0) -> int:
    actor = stage._replicas[replica].actor
    return int(ray.get(actor.pid.remote(), timeout=10))


def run(work: Any, limit_s: float = 100) -> None:
    asyncio.run(asyncio.wait_for(work, limit_s))


def test_every_row_gets_its_column(world: World) -> None:
    """With two replicas, media of another process, and the weights of the newest version in both."""

    async def test() -> None:
        bus = await filled(20, media())
        stage = world.stage(bus, replicas=2)
        await stage.start()
        await stage.load_weights(version(3))
        serving = asyncio.create_task(stage.serve(bus))
        for i, row in enumerate(await made(bus, 20)):
            np.testing.assert_array_equal(row.columns["made"], np.array([i, i + 1]) * 2.0 + 25_000 + 3000)
        await bus.close()
        await serving
        assert bus.repeated == bus.late == 0
        stage.stop()

    run(test())


def test_a_killed_stage_goes_on_where_it_was(world: World) -> None:
    """Its claim is offered again; it has the newest weights and state; every row gets its column once."""

    async def test() -> None:
        bus = await filled(20)
        stage = world.stage(bus)
        await stage.start()
        await stage.load_weights(version(1))
        world.faults("hold")
        serving = asyncio.create_task(stage.serve(bus))
        await until(lambda: world.claimed() == 1)
        first = pid_of(stage)
        os.kill(first, signal.SIGKILL)
        await stage.load_weights(version(2))  # while it is dead
        world.faults()
        rows = await made(bus, 20)
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(row.columns["made"], np.array([i, i + 1]) * 2.0 + 2000)
        assert pid_of(stage) != first and bus.repeated == 0
        assert [line for line in world.notes if line.startswith("stage maker 0 died")] == world.notes != []
        stage.save(world.folder / "saved")
        assert (world.folder / "saved" / "version").read_text() == "2"
        await bus.close()
        await serving
        stage.stop()

    run(test())


@pytest.mark.slow
def test_a_stage_that_dies_before_it_serves_has_its_state_again(world: World) -> None:
    async def test() -> None:
        bus = await filled(4)
        stage = world.stage(bus)
        await stage.start()
        (world.folder / "before").mkdir()
        (world.folder / "before" / "version").write_text("7")
        stage.load(world.folder / "before")
        os.kill(pid_of(stage), signal.SIGKILL)
        serving = asyncio.create_task(stage.serve(bus))
        [row, *_] = await made(bus, 4)
        np.testing.assert_array_equal(row.columns["made"], [7000, 7002])
        await bus.close()
        await serving
        stage.stop()

    run(test())


def test_a_stage_that_raises_ends_with_its_message(world: World) -> None:
    async def test() -> None:
        bus = await filled(4)
        stage = world.stage(bus)
        await stage.start()
        world.faults("raise")
        with pytest.raises(ExceptionGroup) as caught:
            await stage.serve(bus)
        [error] = caught.value.exceptions
        assert type(error) is PluginError
        who = "stages.0: plugin maker (dist-maker 1.0): stage 'maker'"
        assert str(error) == f"{who} failed: ValueError: out of order"
        stage.stop()

    run(test())


@pytest.mark.slow
def test_a_stage_that_dies_again_and_again_ends_the_run(world: World) -> None:
    async def test() -> None:
        bus = await filled(4)
        stage = world.stage(bus, restarts=1)
        await stage.start()
        world.faults("hold")
        serving = asyncio.create_task(stage.serve(bus))
        for deaths in range(2):
            await until(lambda deaths=deaths: world.claimed() == deaths + 1)
            os.kill(pid_of(stage), signal.SIGKILL)
        with pytest.raises(ExceptionGroup) as caught:
            await serving
        [error] = caught.value.exceptions
        assert isinstance(error, RelaxError)
        assert str(error).startswith("stage maker: it died again after 1 restarts within 600 s, the last time: ")
        stage.stop()

    run(test())


@pytest.mark.slow
def test_a_stage_that_cannot_be_built_says_why(world: World) -> None:
    world.faults("refuse")

    async def test() -> None:
        with pytest.raises(PluginError, match=r"stages\.0: plugin maker .*cannot be built: ValueError: no model"):
            await world.stage(await filled(1)).start()
        with pytest.raises(RelaxError, match=r"stage 'tutor': the run has no such stage \(it has maker\)"):
            await world.stage(await filled(1), name="tutor").start()

    run(test())
