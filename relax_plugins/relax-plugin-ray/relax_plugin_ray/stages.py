"""Stages as actors: each serves the bus from a process of its own, and is made anew where it was when it dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from relax_core.annotators import Guarded, annotator
from relax_core.config.columns import planned_stages
from relax_core.errors import PluginError, RelaxError
from relax_core.interfaces import TRAINER_COLUMNS, Stage
from relax_core.replica import Restarts
from relax_core.run import build_algorithm
from relax_core.runtime_config import deployed_of
from relax_core.stages import Advantages, Placed, serve_as
from relax_plugin_ray.boxes import wait
from relax_plugin_ray.plan import ADVANTAGES
from relax_plugin_ray.pool import DELAY_S, WITHIN_S, gist
from relax_plugin_ray.worker import adapter_of, imported, run_of

if TYPE_CHECKING:
    from relax_core.bus import Bus, Holder
    from relax_core.run import Run
    from relax_core.weights import WeightUpdate
    from relax_plugin_ray.bus import RayBus

Actor = Any


# --- the actor --------------------------------------------------------------------------------------------------------


class StageActor:
    """To be made with ``ray.remote``, never restarted by Ray. ``name``: of the stage that it builds and runs."""

    def __init__(self, resolved: Mapping[str, Any], role: str, name: str, bus: RayBus) -> None:
        self._resolved, self._role, self._name, self._bus = resolved, role, name, bus
        self._state = Path()
        self._stage: Stage | None = None

    def __repr__(self) -> str:
        return self._role

    @property
    def _built(self) -> Stage:
        if self._stage is None:
            raise RelaxError(f"{self._role}: it was asked to work before it was ready")
        return self._stage

    async def ready(self, state: Path, update: WeightUpdate | None = None, again: bool = False) -> None:
        """Build the stage.

        ``state``: a folder in which it keeps, after each change, what it could not build anew. ``again``: it goes on
        where one that died was.
        """
        self._state = state
        stage = self._build(run_of(self._resolved, self._role))
        if again and (state / "now").exists():
            stage.load(state / "now")
        self._stage = stage
        if update is not None:
            await self.load_weights(update)

    def _build(self, run: Run) -> Stage:
        algorithm = build_algorithm(run)
        if self._name == ADVANTAGES:  # needs neither the model nor media
            return Advantages(algorithm, TRAINER_COLUMNS)
        adapter, self._bus.media = adapter_of(run)
        plans, problems = planned_stages(run.config, run.stack, algorithm)
        apart = deployed_of(run).old_policy_gpus is not None
        for plan in plans:
            if plan.section.id == self._name:
                imported(run, "stages", plan.section)
                return annotator(plan, run, algorithm, adapter, self._bus.media, old_apart=apart)
        made = ", ".join(plan.section.id for plan in plans) or "none"
        raise RelaxError(f"stage {self._name!r}: the run has no such stage ({'; '.join(problems) or f'it has {made}'})")

    async def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    async def serve(self, holder: Holder) -> None:
        """Work as this incarnation until the bus is closed; raises what ends it."""
        await serve_as(holder, self._built, self._bus)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._built.load_weights(update)
        self._keep()

    async def save(self, folder: Path) -> None:
        self._built.save(folder)

    async def load(self, folder: Path) -> None:
        self._built.load(folder)
        self._keep()

    def _keep(self) -> None:
        """Write the state, so that it is whole in its folder at any moment; most stages have none."""
        stage = self._built
        inner = stage.stage if isinstance(stage, Guarded) else stage
        if type(inner).save is Stage.save:
            return
        now, new, old = (self._state / name for name in ("now", "new", "old"))
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir(parents=True)
        stage.save(new)
        if now.exists():
            os.rename(now, old)
        os.rename(new, now)
        shutil.rmtree(old, ignore_errors=True)


# --- the controller's side --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Replica:
    index: int
    actor: Actor = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RemoteStage(Placed):
    """A stage that lives in ``replicas`` actors beside each other.

    ``create`` makes the actor of a replica (see ``StageActor``), also in the place of one that died; more than
    ``restarts`` of them within ten minutes end the run. ``state``: see ``state_of``.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[int], Actor],
        state: Path,
        replicas: int = 1,
        restarts: int = 5,
        note: Callable[[str], None] = lambda line: None,
        start_s: float = 300.0,
    ) -> None:
        self.name, self._create, self._state, self._note, self._start_s = name, create, state, note, start_s
        self._replicas = [_Replica(i) for i in range(replicas)]
        self._restarts = Restarts(restarts, WITHIN_S, DELAY_S)
        self._update: WeightUpdate | None = None

    @property
    def actors(self) -> list[Actor]:
        return [replica.actor for replica in self._replicas]

    async def start(self) -> None:
        """Build the stage in all replicas. Raises what one of them raised, and then nothing is left running."""
        shutil.rmtree(self._state, ignore_errors=True)  # of an earlier run
        for replica in self._replicas:
            replica.actor = self._create(replica.index)
        try:
            await asyncio.gather(*(self._ready(replica.index, replica.actor) for replica in self._replicas))
        except BaseException as error:
            self.stop()
            if isinstance(error, RayActorError):
                raise RelaxError(
                    f"stage {self.name}: it died while it was built ({gist(error)}); see its log"
                ) from error
            raise

    def stop(self) -> None:
        """End all replicas, whatever they are doing."""
        for replica in self._replicas:
            if replica.actor is not None:
                ray.kill(replica.actor)
                replica.actor = None

    async def _ready(self, index: int, actor: Actor, again: bool = False) -> None:
        call = actor.ready.remote(self._state / str(index), self._update, again)
        try:
            await asyncio.wait_for(self._answer(call), self._start_s)
        except TimeoutError:
            raise RelaxError(
                f"stage {self.name}: it was not ready within {self._start_s:g} s: see whether the cluster has room for "
                "it, or raise runtime.start_s"
            ) from None

    # --- at work ------------------------------------------------------------------------------------------------------

    async def serve(self, bus: Bus) -> None:
        async with asyncio.TaskGroup() as group:
            for replica in self._replicas:
                group.create_task(self._serve(replica, bus), name=f"{self.name}-{replica.index}")

    async def _serve(self, replica: _Replica, bus: Bus) -> None:
        while True:
            actor, holder = replica.actor, bus.register(f"{self.name}-{replica.index}")
            try:
                await self._answer(actor.serve.remote(holder))
                return
            except RayActorError as error:
                bus.declare_dead(holder)  # what it had claimed is offered again
                await self._revive(replica, actor, error)

    async def load_weights(self, update: WeightUpdate) -> None:
        self._update = update
        await asyncio.gather(*(self._load(replica, update) for replica in self._replicas))

    async def _load(self, replica: _Replica, update: WeightUpdate) -> None:
        actor = replica.actor
        try:
            await self._answer(actor.load_weights.remote(update))
        except RayActorError as error:
            await self._revive(replica, actor, error)

    async def _revive(self, replica: _Replica, dead: Actor, error: RayActorError) -> None:
        """Make the actor anew, once for all calls that it took with it."""
        async with replica.lock:
            while replica.actor is dead:
                ray.kill(dead)
                delay = self._restarts.delay(time.monotonic())
                if delay is None:
                    raise RelaxError(
                        f"stage {self.name}: it died again after {self._restarts}, the last time: {gist(error)}; look "
                        "at its log, or raise runtime.restarts"
                    ) from error
                self._note(f"stage {self.name} {replica.index} died ({gist(error)}): it is started again")
                await asyncio.sleep(delay)
                try:
                    replica.actor = await self._made_anew(replica.index)
                except RayActorError as again:
                    error = again

    async def _made_anew(self, index: int) -> Actor:
        """With what the one before it kept, and with the newest weights."""
        given, actor = self._update, self._create(index)
        await self._ready(index, actor, again=True)
        while given is not self._update:  # published meanwhile; who publishes asked the dead one
            given = self._update
            await self._answer(actor.load_weights.remote(given))
        return actor

    async def _answer(self, reference: Any) -> Any:
        """Raises what the stage raised as it was raised, RayActorError if it died."""
        try:
            return await reference
        except RayTaskError as error:
            raise self._cause(error) from None

    def _cause(self, error: RayTaskError) -> BaseException:
        cause = error.cause
        return cause if isinstance(cause, Exception) else PluginError(f"stage {self.name} failed: {gist(error)}")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Blocks. The first replica's state; they all have the same."""
        try:
            self._wait(self._replicas[0].actor.save.remote(folder.absolute()))
        except RayActorError:  # it will be made anew from what it kept
            kept = self._state / "0" / "now"
            if kept.exists():
                shutil.copytree(kept, folder, dirs_exist_ok=True)

    def load(self, folder: Path) -> None:
        """Blocks."""
        for replica in self._replicas:
            try:
                self._wait(replica.actor.load.remote(folder.absolute()))
            except RayActorError as error:
                raise RelaxError(f"stage {self.name}: it died while it read {folder} ({gist(error)})") from error

    def _wait(self, reference: Any) -> Any:
        try:
            return wait(reference)
        except RayTaskError as error:
            raise self._cause(error) from None


def state_of(run: Run, name: str) -> Path:
    """The folder in which the actors of a stage keep their state, each in one of its own."""
    return run.directory.absolute() / "stages" / name
