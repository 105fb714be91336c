"""The live parts of a run: roles, bus, stages and files, assembled, restored, saved and ended together."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_core.admission import Admission
from relax_core.collector import Collector
from relax_core.conversations import ends, said
from relax_core.errors import CheckpointError
from relax_core.evaluate import Evaluator, Results
from relax_core.feed import Feed
from relax_core.hookspecs import CheckpointEvent, EvaluationEnd, WeightsPublished
from relax_core.probe_run import accept_engines
from relax_core.prompts import Prompts
from relax_core.rollout import Rollout
from relax_core.run import build_algorithm
from relax_core.scoring import asks_policy
from relax_core.stages import Here, Score
from relax_core.storage import Storage
from relax_core.tasks import TaskStream
from relax_core.totals import Totals
from relax_core.turns import Turns
from relax_core.types import Version

if TYPE_CHECKING:
    from relax_core.bus import BusState
    from relax_core.interfaces import Algorithm
    from relax_core.run import Run
    from relax_core.runtime import Roles, Runtime
    from relax_core.screen import Screen
    from relax_core.stages import Placed
    from relax_core.weights import WeightUpdate

T = TypeVar("T")
SCORE_WORKERS = 64
"""Groups that are scored at the same time, at most."""


class System:
    """Built by ``assembled``. What the loop in train.py calls, and the state that a checkpoint holds."""

    def __init__(self, run: Run, roles: Roles, screen: Screen, readonly: bool = False) -> None:
        config = run.config
        self.run, self.roles, self.screen = run, roles, screen
        self.engine, self.trainer, self.bus = roles.engine, roles.trainer, roles.bus
        self.totals = Totals()
        self.algorithm: Algorithm = build_algorithm(run)
        prompts = Prompts(roles.adapter, config.data)
        weighted = {
            section.label: (roles.environments[section.label], section.weight) for section in config.environments
        }
        self.feed = Feed(TaskStream(weighted, config.seed), prompts, config.data, config.groups_per_step, screen.note)
        self.evaluator = Evaluator(run, roles, prompts, screen.note)
        for name, hashes in self.evaluator.held_out().items():
            self.feed.hold_out(hashes, name)
        self.admission = Admission(config.groups_per_step, config.max_staleness, config.max_replays, config.steps)
        self.rollout = Rollout(run, roles, self.admission, self.feed, screen.note)
        self.holder = self.bus.register("train")
        self.storage = Storage(run, roles.media, readonly)
        self.journal, self.trajectories = self.storage.journal, self.storage.trajectories
        self.first_step, self.lineage = 0, 0
        self.turns = Turns(roles.engine, roles.trainer, roles.colocated)
        self.published = (0.0, 0)
        """Seconds and bytes of the newest publication."""
        self._publication: asyncio.Task[None] | None = None
        self.collector = Collector()
        self._evaluation: asyncio.Task[Results] | None = None
        self._evaluated = 0

    # --- running ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """The rollout and the stages run beside the block; an error in one ends the block with that error."""
        try:
            with self.collector:
                async with asyncio.TaskGroup() as group:
                    playing = group.create_task(self.rollout.serve(), name="rollout")
                    for name, stage in self._stages():
                        group.create_task(stage.serve(self.bus), name=name)
                    self._beside = group
                    yield
                    await self.end_evaluation()
                    await self.end_publication()
                    playing.cancel()
                    await self.bus.close()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self.feed.close()
            self._write_bad_rows()

    def beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task beside the loop; an error in it ends ``at_work``, and the end of that ends it."""
        return self._beside.create_task(work)

    def _stages(self) -> Iterator[tuple[str, Placed]]:
        """Every stage between rollout and trainer, with its name; scoring once for each worker."""
        forget = self.roles.players.forget
        turn = self.turns.of_engine if asks_policy(self.run.config, self.run.stack) else nullcontext
        score = Score(self.run, self.roles.graders, self.bus, self.admission, self.rollout.decided, forget, turn)
        yield from ((f"score-{i}", Here(score, f"score-{i}")) for i in range(SCORE_WORKERS))
        yield from self.roles.stages.items()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def probe(self) -> None:
        """Refuse engines that sample from anything but what the trainer computes. Raises ConfigError."""
        if not self.roles.simulated:
            accepted = await accept_engines(self.run, self.roles, self.turns, self.lineage, self.first_step)
            self.screen.note(accepted)

    async def publish(self, number: int) -> None:
        """Engines and stages serve the trainer's weights as version ``number`` when this returns."""
        await self._load(*await self._copied(number))

    async def begin_publication(self, number: int) -> None:
        """Copy the trainer's weights as version ``number``; engines load them while the trainer goes on.

        No group starts until they serve it. Synchronous runs wait for that here: there is nothing to go on with.
        """
        await self.end_publication()
        self.admission.hold()
        copied = await self._copied(number)
        self._publication = self.beside(self._load_and_free(*copied))
        if self.run.config.max_staleness == 0 or self.roles.colocated:
            await self.end_publication()

    async def end_publication(self) -> None:
        """Wait until the version that was published last is served."""
        if self._publication is not None:
            await self._publication
            self._publication = None

    async def _copied(self, number: int) -> tuple[WeightUpdate, float]:
        start = time.perf_counter()
        update = await self.roles.publish(Version(self.lineage, number))
        await self.turns.to_engine()
        return update, start

    async def _load(self, update: WeightUpdate, start: float) -> None:
        receivers = [stage.load_weights(update) for stage in self.roles.stages.values()]
        receivers.append(self.roles.old_policy.load_weights(update))
        await asyncio.gather(self.engine.load_weights(update, self.run.config.interrupt), *receivers)
        seconds = time.perf_counter() - start
        self.published = (seconds, update.manifest.nbytes)
        event = WeightsPublished(update.manifest.version, seconds, update.manifest.nbytes)
        self.run.stack.hook.on_weights_published(run=self.run, event=event)

    async def _load_and_free(self, update: WeightUpdate, start: float) -> None:
        await self._load(update, start)
        self.admission.free()

    # --- evaluation ---------------------------------------------------------------------------------------------------

    async def begin_evaluation(self, version: int) -> None:
        """Start the sets that are due on this version once it is served; publication waits for ``end_evaluation``."""
        if sections := self.evaluator.due(version):
            await self.end_publication()
            self._evaluated = version
            self._evaluation = asyncio.create_task(self.evaluator.evaluate(sections), name="evaluation")

    async def end_evaluation(self) -> None:
        """Wait for a running evaluation and record its results."""
        if self._evaluation is None:
            return
        results = await self._evaluation
        self._evaluation = None
        self.totals.evaluation.update(results)
        for name, values in results.items():
            self.storage.log(self._evaluated, {f"evaluation/{name}/{k}": v for k, v in values.items()}, "eval")
        self.screen.evaluation(self._evaluated, results)
        event = EvaluationEnd(self._evaluated, results)
        self.run.stack.hook.on_evaluation_end(run=self.run, event=event)

    # --- metrics ------------------------------------------------------------------------------------------------------

    async def engine_gauges(self) -> dict[str, float]:
        """What the engines say of themselves just now; each replica's own only where there are several."""
        gauges = await self.engine.health()
        alone = gauges.get("replicas") == 1
        return {f"time/engine/{k}": v for k, v in gauges.items() if not (alone and k.startswith("replicas/"))}

    def log(self, version: int, metrics: Mapping[str, Any]) -> None:
        self.storage.log(version, metrics)
        self.collector.step(version)
        self.screen.step(version, metrics)

    def finish(self) -> None:
        """The summary of a complete run."""
        self._write_summary(self.run.config.steps)

    def _write_summary(self, version: int) -> None:
        bad = (self.feed.bad, self.evaluator.bad)
        left_out = {"bad_rows": bad[0].counts() | bad[1].counts(), "long_prompts": dict(self.feed.counts)}
        self.storage.write_summary(self.totals, self.admission, version, left_out)
        self._write_bad_rows()

    def _write_bad_rows(self) -> None:
        """Those of training and of evaluations; also when the run ends because there are too many."""
        self.storage.write_bad_rows(line for found in (self.feed.bad, self.evaluator.bad) for line in found.lines())

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint_due(self, version: int) -> bool:
        """By interval, at the end, or early when rows kept for the next checkpoint fill half of the bus."""
        config = self.run.config
        crowded = 2 * self.bus.retained_rows > config.bus.max_rows or 2 * self.bus.bytes > config.bus.max_bytes
        return version % config.checkpoint.every == 0 or version == config.steps or crowded

    async def save(self, version: int) -> None:
        """Write everything that a continuation needs, then free the rows that it covers."""
        await self.rollout.settled()
        self.storage.sync()
        with self.storage.checkpoints.write(version) as folder:
            self.trainer.save(folder / "trainer")
            for id, stage in self.roles.stages.items():
                stage.save(folder / "stages" / id)
            (folder / "bus.pkl").write_bytes(pickle.dumps(self.bus.snapshot(), protocol=pickle.HIGHEST_PROTOCOL))
            state = {
                "step": version,
                "lineage": self.lineage,
                "admission": self.admission.state(),
                "feed": self.feed.state(),
                "played": dict(self.rollout.plays.counts),
                "totals": self.totals.state(),
                "callbacks": {name: c.state_dict() for name, c in self.run.stack.callbacks.items()},
            }
            (folder / "state.json").write_text(json.dumps(state))
            self.run.stack.hook.on_save_checkpoint(run=self.run, event=CheckpointEvent(version, folder))
        freed = self.bus.release(version - 1)
        self.roles.players.forget({row.id: row.columns for row in freed})
        self._write_summary(version)

    def restore(self, version: int, folder: Path) -> None:
        """Continue from a checkpoint under a new lineage; files are cut back to its step."""
        state = json.loads((folder / "state.json").read_text())
        self.trainer.load(folder / "trainer")
        for id, stage in self.roles.stages.items():
            stage.load(folder / "stages" / id)
        self.admission.restore(state["admission"])
        self.feed.restore(state["feed"], self.admission.next_position)
        self.rollout.plays.counts.update(state["played"])
        self._restore_bus(pickle.loads((folder / "bus.pkl").read_bytes()))
        self.totals.restore(state["totals"])
        for name, callback in self.run.stack.callbacks.items():
            callback.load_state_dict(state["callbacks"].get(name, {}))
        self.first_step, self.lineage = version, state["lineage"] + 1
        self.run.stack.hook.on_load_checkpoint(run=self.run, event=CheckpointEvent(version, folder))

    def _restore_bus(self, state: BusState) -> None:
        """Rows name media features by key: their prompts are encoded again, which makes equal ones."""
        with self.roles.media.holding():
            for group in state.groups:
                for row in group.views():
                    if row.columns["media"]:
                        members = {t.member: t for t in row.columns["played"].trajectories}
                        turns = members[row.member].turns
                        for last in ends(turns):
                            self.roles.adapter.encode(said(turns, last)[:-1])
                        self.roles.players.hold({row.id: row.columns})
            self.bus.restore(state)


@asynccontextmanager
async def assembled(run: Run, screen: Screen, readonly: bool = False) -> AsyncIterator[System]:
    """Start the runtime's roles and restore the newest checkpoint; everything is ended again at the end.

    ``readonly``: the run's files stay as they are; another process may be training.
    """
    runtime: Runtime = run.stack.build("runtimes", run.config.runtime, where="runtime")
    try:
        roles = await runtime.start(run, screen.note, training=not readonly)
        system = System(run, roles, screen, readonly)
        newest = system.storage.checkpoints.newest(screen.note)
        if newest is None and system.storage.checkpoints.steps():
            raise CheckpointError(f"{run.directory}: no checkpoint is whole: remove the directory to begin anew")
        if newest is not None:
            system.restore(*newest)
            screen.note(f"{run.directory}: going on from the checkpoint of step {newest[0]}")
        if not readonly:
            system.storage.cut_back(system.first_step)
        screen.start(system.first_step)
        yield system
        system.storage.close()
    finally:
        await runtime.stop()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
