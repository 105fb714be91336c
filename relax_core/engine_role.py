"""Engines as roles: the policy's, and those with models of their own; built here, or in a process of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.run import build_adapter, rebuild
from relax_core.setup import EngineSetup, printed

if TYPE_CHECKING:
    from relax_core.asking import Asker
    from relax_core.config.schema import ComponentSection
    from relax_core.interfaces import Engine, ModelAdapter
    from relax_core.media import MediaStore
    from relax_core.run import Run


def engine_setup(
    run: Run, adapter: ModelAdapter, role: str = "engine", note: Callable[[str], None] = printed
) -> EngineSetup:
    """Synchronous runs repeat bit for bit, so their batches must not depend on timing."""
    return EngineSetup(adapter, run.config.seed, run.config.max_staleness == 0, run.directory, role, note)


@dataclass(frozen=True, slots=True)
class EngineRole:
    """What an engine is made of. ``where``: what the paths of its sections begin with, such as ``rewards.0.``;
    ``name``: how its processes and logs are called."""

    model: ComponentSection
    engine: ComponentSection
    where: str = ""
    name: str = "engine"

    @classmethod
    def of_policy(cls, run: Run) -> EngineRole:
        """The run's own engine."""
        return cls(run.config.model, run.config.engine)

    def adapter(self, run: Run) -> tuple[ModelAdapter, MediaStore]:
        return build_adapter(run, self.model, f"{self.where}model")

    def here(self, run: Run, adapter: ModelAdapter, note: Callable[[str], None] = printed) -> Engine:
        """In this process, not started yet."""
        setup = engine_setup(run, adapter, self.name, note)
        engine: Engine = run.stack.build("engines", self.engine, setup, where=f"{self.where}engine")
        return engine

    def apart(self, run: Run, media: MediaStore) -> Engine:
        """In a process of its own, which begins when it is started."""
        from relax_core.config.resolve import resolved
        from relax_core.remote.process import ProcessEngine

        return ProcessEngine(EngineBuilder(resolved(run.config, run.stack), self), media)


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """Builds an engine in another process (picklable)."""

    resolved: dict[str, object]
    role: EngineRole

    def __call__(self) -> tuple[Engine, MediaStore]:
        run = rebuild(self.resolved)
        adapter, media = self.role.adapter(run)
        return self.role.here(run, adapter), media


async def serving(role: EngineRole, run: Run, *, apart: bool, note: Callable[[str], None]) -> Asker:
    """A started engine with its model's first weights, for who asks it; ``apart``: in a process of its own.

    It is started again when it dies. Stop it by ``asker.engine.stop()``. Raises RelaxError when it cannot be built.
    """
    from relax_core.asking import Asker
    from relax_core.router import Router

    adapter, media = role.adapter(run)
    engine = Router([role.apart(run, media) if apart else role.here(run, adapter, note)], note)
    await engine.start()
    return Asker(engine, adapter, run.config.seed, run.config.max_staleness == 0)
