"""Runtimes place roles. ``local``: one machine, an in-memory bus, the engine in this process or in one of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relax_core.actor_critic import build_trainer
from relax_core.annotators import annotator
from relax_core.aside import Aside
from relax_core.asking import Asker
from relax_core.bus import Bus
from relax_core.config.columns import planned_stages, values_in_step
from relax_core.config.schema import ComponentSection
from relax_core.engine_role import EngineRole
from relax_core.interfaces import TRAINER_COLUMNS, VALUES, Configurable, Stage, Streaming
from relax_core.old_policy import OldPolicy, TrainerItself
from relax_core.players import Player, Players
from relax_core.router import Router
from relax_core.run import Run, build_adapter, build_algorithm, build_environments
from relax_core.runtime_config import LocalConfig
from relax_core.scoring import Graders, Scorer
from relax_core.stages import Advantages, Here, Placed
from relax_core.types import Version
from relax_core.weights import blank

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm, Engine, Environment, ModelAdapter, Trainer, Transport
    from relax_core.media import MediaStore
    from relax_core.weights import WeightUpdate

Note = Callable[[str], None]
"""Says a line to who watches the run."""


class Publisher(Protocol):
    def __call__(self, version: Version, blank: bool = False) -> Awaitable[WeightUpdate]:
        """Copy the trainer's weights to where engines and stages can read them, as this version.

        ``blank``: zeros in their place, which all travel; for the probe of engines (see probe.py).
        """


def published(transport: Transport, trainer: Trainer, version: Version, zeros: bool) -> WeightUpdate:
    """What a ``Publisher`` does where the trainer is."""
    weights, frozen = trainer.weights(), trainer.frozen_names()
    if zeros:
        return transport.publish(version, blank(weights), frozenset())
    return transport.publish(version, weights, frozen)


@dataclass(frozen=True, slots=True)
class Roles:
    """The deployed roles of a run, behind their interfaces: the training loop does not know where they live."""

    engine: Engine
    trainer: Trainer
    publish: Publisher
    bus: Bus
    players: Players
    graders: Graders
    stages: Mapping[str, Placed]
    """Between scoring and training, by name."""
    environments: Mapping[str, Environment]
    """By label; those of this process, whose tasks are read here."""
    adapter: ModelAdapter
    media: MediaStore
    old_policy: OldPolicy
    colocated: bool = False
    """Whether engine and trainer take turns on the same devices."""
    simulated: bool = False
    """Whether engine and trainer compute nothing: then there is nothing to probe."""


class Runtime(Configurable, ABC):
    """Builds roles and ends them."""

    @abstractmethod
    async def start(self, run: Run, note: Note, training: bool = True) -> Roles:
        """Every role, ready to work. Raises RelaxError when one cannot be built; then nothing is left running.

        ``training`` False: only what an evaluation needs; there are no stages.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End every role. Safe to call at any time."""


class LocalRuntime(Runtime):
    """Everything on this machine, without Ray."""

    Config = LocalConfig

    @classmethod
    def check(cls, config: LocalConfig, run: RunConfig) -> Iterable[str]:
        if config.overlap == "process" and run.transport is not None and run.transport.id == "copy":
            yield (
                "overlap 'process' with transport 'copy', which stays in one process: take 'shared', 'broadcast' or "
                "'tcp', or leave it out"
            )

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)
        self._engine: Engine | None = None
        self._transport: Transport | None = None
        self._graders: Graders | None = None
        self._environments: Mapping[str, Environment] = {}
        self._aside: Aside | None = None

    async def start(self, run: Run, note: Note, training: bool = True) -> Roles:
        config, stack = run.config, run.stack
        adapter, media = build_adapter(run)
        in_process = self.config.overlap == "turns"
        default = ComponentSection(id="copy" if in_process else "shared")
        transport: Transport = stack.build("transports", config.transport or default, where="transport")
        self._transport = transport
        algorithm = build_algorithm(run)
        trainer = build_trainer(run, adapter, algorithm.outputs, training)
        if not in_process:
            trainer = self._aside = Aside(trainer)
        colocated = self.config.placement == "colocate"
        stages = stages_here(run, algorithm, adapter, media, trainer, colocated) if training else {}
        environments = self._environments = build_environments(run)
        graders = self._graders = Scorer.of(run, note)
        role = EngineRole.of_policy(run)
        engine = Router([role.here(run, adapter, note) if in_process else role.apart(run, media)], note)
        self._engine = engine
        await engine.start()
        asker = Asker(engine, adapter, config.seed, deterministic=config.max_staleness == 0)
        await graders.begin(run, asker, apart=not in_process)
        bus = Bus(config.bus.max_rows, config.bus.max_bytes)

        async def publish(version: Version, blank: bool = False) -> WeightUpdate:
            return published(transport, trainer, version, blank)

        return Roles(
            engine=engine,
            trainer=trainer,
            publish=publish,
            bus=bus,
            players=Player(run, engine, adapter, environments, bus),
            graders=graders,
            stages=stages,
            environments=environments,
            adapter=adapter,
            media=media,
            old_policy=TrainerItself(trainer),
            colocated=colocated,
        )

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()
        if self._graders is not None:
            await self._graders.close()
        for environment in self._environments.values():
            await environment.close()
        if self._aside is not None:
            self._aside.close()
        if self._transport is not None:
            self._transport.close()


def stages_here(
    run: Run,
    algorithm: Algorithm,
    adapter: ModelAdapter,
    media: MediaStore,
    trainer: Trainer,
    colocated: bool = False,
) -> dict[str, Placed]:
    """Every stage between scoring and training, in this process."""
    in_step = values_in_step(algorithm, colocated)
    plans, _ = planned_stages(run.config, run.stack, algorithm)
    stages: dict[str, Stage] = {
        plan.section.id: annotator(plan, run, algorithm, adapter, media, trainer)
        for plan in plans
        if not (in_step and plan.columns == VALUES)
    }
    if algorithm.streaming is not Streaming.BATCH and not in_step:  # else the step credits its groups itself
        stages["advantages"] = Advantages(algorithm, TRAINER_COLUMNS)
    return {name: Here(stage, name) for name, stage in stages.items()}
