"""A plugin of Relax whose runtime places simulated engines behind the real router, and a simulated trainer.

Everything else of a run is the product's: loop, admission, bus, stages, scoring, players, chat, feed, files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from benchmarks.simulate_costs import RECORDED, Costs
from benchmarks.simulate_parts import Meter, ModelConfig, SimulatedEngine, SimulatedTrainer, chance
from relax_core.bus import Bus
from relax_core.hookspecs import API_VERSION, Callback, GroupEvent, StepEnd
from relax_core.interfaces import Component, ComponentConfig
from relax_core.old_policy import TrainerItself
from relax_core.players import Player
from relax_core.router import Router
from relax_core.run import Run, build_adapter, build_algorithm, build_environments
from relax_core.runtime import Note, Roles, Runtime, stages_here
from relax_core.scoring import Scorer
from relax_core.types import Version
from relax_core.weights import Manifest, WeightUpdate

if TYPE_CHECKING:
    from relax_core.weights import Links

relax_api = API_VERSION


def relax_runtimes() -> Mapping[str, Component]:
    return {"simulated": Component("benchmarks.simulate_plugin:SimulatedRuntime", RuntimeConfig, "Virtual time.")}


def relax_environments() -> Mapping[str, Component]:
    return {"simulated": Component("benchmarks.simulate_parts:SimulatedEnvironment", summary="Replies and tools.")}


def relax_rewards() -> Mapping[str, Component]:
    return {"simulated": Component("benchmarks.simulate_parts:SimulatedReward", summary="0 or 1 by chance.")}


def relax_models() -> Mapping[str, Component]:
    return {"simulated": Component("benchmarks.simulate_parts:SimulatedModel", ModelConfig, "It computes nothing.")}


def relax_callbacks() -> Mapping[str, Component]:
    return {"watch": Component("benchmarks.simulate_plugin:Watch", summary="Filters groups, and reads the clocks.")}


class NoWeights:
    """The handle of a publication that holds nothing."""

    device = "cpu"

    def fill(self, out: Any, start: int, links: Links) -> Any:
        raise NotImplementedError("the simulated trainer has no weights")


class RuntimeConfig(ComponentConfig):
    engines: PositiveInt = 8
    ranks: PositiveInt = 8
    placement: Literal["colocate", "separate"] = "separate"
    slots: PositiveInt = 512
    """Rows that an engine decodes at once, at most."""
    tokens_per_micro_batch: PositiveInt = 4096
    """Of a rank."""
    costs: dict[str, float] = {}
    """Of ``Costs``; default: the recorded ones."""


class SimulatedRuntime(Runtime):
    Config = RuntimeConfig
    config: RuntimeConfig

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        self.meter = Meter()
        self.engines: list[SimulatedEngine] = []
        self._router: Router | None = None

    async def start(self, run: Run, note: Note, training: bool = True) -> Roles:
        c, meter = self.config, self.meter
        costs = Costs(**c.costs) if c.costs else RECORDED
        adapter, media = build_adapter(run)
        environments = build_environments(run)
        self.engines = [SimulatedEngine(costs, c.slots, run.config.seed, meter) for _ in range(c.engines)]
        engine = self._router = Router(self.engines, note)
        await engine.start()
        bus = Bus(run.config.bus.max_rows, run.config.bus.max_bytes)
        trainer = SimulatedTrainer(costs, c.ranks, c.tokens_per_micro_batch, meter)

        async def publish(version: Version, blank: bool = False) -> WeightUpdate:
            await asyncio.sleep(costs.publish_s)
            return WeightUpdate(Manifest(version, ()), NoWeights())

        watches = [w for w in run.stack.callbacks.values() if isinstance(w, Watch)]
        for watch in watches:
            watch.begin(self.engines, trainer, meter)
        return Roles(
            engine=engine,
            trainer=trainer,
            publish=publish,
            bus=bus,
            players=Player(run, engine, adapter, environments, bus),
            graders=Scorer.of(run, note),
            stages=stages_here(run, build_algorithm(run), adapter, media, trainer),
            environments=environments,
            adapter=adapter,
            media=media,
            old_policy=TrainerItself(trainer),
            colocated=c.placement == "colocate",
            simulated=True,
        )

    async def stop(self) -> None:
        if self._router is not None:
            await self._router.stop()


class WatchConfig(ComponentConfig):
    enough: int | None = None
    """Steps after which the run is ended, as if interrupted; default: it goes on to its end."""
    filtered: float = 0.0
    """Share of the scored groups that are filtered."""
    seed: int = 0


class Watch(Callback):
    """At the end of each step: virtual seconds, CPU seconds of the process and by what is not the control plane."""

    Config = WatchConfig

    def __init__(self, config: WatchConfig) -> None:
        self.config = config
        self.readings: list[dict[str, Any]] = []

    def begin(self, engines: list[SimulatedEngine], trainer: SimulatedTrainer, meter: Meter) -> None:
        self.engines, self.trainer, self.meter = engines, trainer, meter

    def filter_group(self, run: Run, value: str | None, event: GroupEvent) -> str | None:
        filtered = chance(self.config.seed, "filtered", event.group.task.id) < self.config.filtered
        return value or ("by chance" if filtered else None)

    def on_step_end(self, run: Run, event: StepEnd) -> None:
        with self.meter("watch"):
            for engine in self.engines:
                engine.advance()
            reading = {
                "step": event.step,
                "virtual_s": asyncio.get_running_loop().time(),
                "engines_busy_s": sum(engine.busy_s for engine in self.engines),
                "trainer_busy_s": self.trainer.busy_s,
                "rows": self.trainer.rows,
                "lags": dict(self.trainer.lags),
                "length_trained": event.metrics["length/trained"],
            }
        self.readings.append(reading | {"cpu_s": time.process_time(), "elsewhere": dict(self.meter.seconds)})
        if len(self.readings) == self.config.enough:
            self.trainer.over = True
