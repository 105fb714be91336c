"""Runtimes place roles. ``local``: one machine, an in-memory bus, the engine in this process or in one of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.bus import Bus
from relax_core.config.schema import ComponentSection
from relax_core.interfaces import Configurable
from relax_core.run import Run, build_adapter, build_algorithm
from relax_core.runtime_config import LocalConfig
from relax_core.setup import EngineSetup, TrainerSetup

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Engine, ModelAdapter, Trainer, Transport
    from relax_core.media import MediaStore


@dataclass(frozen=True, slots=True)
class Roles:
    """The deployed roles of a run, behind their interfaces: the training loop does not know where they live."""

    engine: Engine
    trainer: Trainer
    transport: Transport
    bus: Bus
    adapter: ModelAdapter
    media: MediaStore


class Runtime(Configurable, ABC):
    """Builds roles and ends them."""

    @abstractmethod
    async def start(self, run: Run) -> Roles:
        """Every role, ready to work. Raises RelaxError when one cannot be built; then nothing is left running."""

    @abstractmethod
    async def stop(self) -> None:
        """End every role. Safe to call at any time."""


class LocalRuntime(Runtime):
    """Everything on this machine, without Ray."""

    Config = LocalConfig

    @classmethod
    def check(cls, config: LocalConfig, run: RunConfig) -> Iterable[str]:
        if config.overlap == "process" and run.transport is not None and run.transport.id == "copy":
            yield "overlap 'process' with transport 'copy', which stays in one process: take 'shared', or leave it out"

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)
        self._engine: Engine | None = None
        self._transport: Transport | None = None

    async def start(self, run: Run) -> Roles:
        config, stack = run.config, run.stack
        adapter, media = build_adapter(run)
        in_process = self.config.overlap == "turns"
        default = ComponentSection(id="copy" if in_process else "shared")
        self._transport = stack.build("transports", config.transport or default, where="transport")
        setup = TrainerSetup(adapter, run, build_algorithm(run).outputs)
        trainer = stack.build("trainers", config.trainer, setup, where="trainer")
        engine = self._build_engine(run, adapter) if in_process else self._spawn_engine(run, media)
        self._engine = engine
        await engine.start()
        bus = Bus(config.bus.max_rows, config.bus.max_bytes)
        return Roles(engine, trainer, self._transport, bus, adapter, media)

    def _build_engine(self, run: Run, adapter: ModelAdapter) -> Engine:
        engine: Engine = run.stack.build("engines", run.config.engine, engine_setup(run, adapter), where="engine")
        return engine

    def _spawn_engine(self, run: Run, media: MediaStore) -> Engine:
        from relax_core.config.resolve import resolved
        from relax_core.torch.process import ProcessEngine

        return ProcessEngine(EngineBuilder(resolved(run.config, run.stack)), media)

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()
        if self._transport is not None:
            self._transport.close()


def engine_setup(run: Run, adapter: ModelAdapter) -> EngineSetup:
    """Synchronous runs repeat bit for bit, so their batches must not depend on timing."""
    return EngineSetup(adapter, run.config.seed, deterministic=run.config.max_staleness == 0)


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """Builds the run file's engine in another process (picklable)."""

    resolved: dict[str, object]

    def __call__(self) -> tuple[Engine, MediaStore]:
        from relax_core.run import rebuild

        run = rebuild(self.resolved)
        adapter, media = build_adapter(run)
        engine: Engine = run.stack.build("engines", run.config.engine, engine_setup(run, adapter), where="engine")
        return engine, media
