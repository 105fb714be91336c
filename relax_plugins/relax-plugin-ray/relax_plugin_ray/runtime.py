"""The runtime ``ray``: every role an actor, or a group of actors, in its own placement group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from relax_core.actor_critic import ActorCritic
from relax_core.annotators import annotator
from relax_core.config.columns import planned_stages, values_in_step
from relax_core.config.resolve import resolved
from relax_core.old_policy import TrainerItself
from relax_core.router import Router
from relax_core.run import build_algorithm, build_environments
from relax_core.runtime import Note, Roles, Runtime
from relax_core.scoring import asks_policy
from relax_core.stages import Here
from relax_plugin_ray.checks import problems
from relax_plugin_ray.config import Ranks, RayConfig, Replicas, cores_of
from relax_plugin_ray.plan import ASKING, CRITIC, OLD_POLICY, needed_others, old_policy_apart

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm, ModelAdapter, Trainer
    from relax_core.run import Run
    from relax_core.stages import Placed
    from relax_core.types import LearnerName
    from relax_plugin_ray.bus import RayBus
    from relax_plugin_ray.cluster import Cluster
    from relax_plugin_ray.engine import RayEngine
    from relax_plugin_ray.media import SharedMedia
    from relax_plugin_ray.old_policy import RemoteOldPolicy
    from relax_plugin_ray.pool import Pool
    from relax_plugin_ray.stages import RemoteStage
    from relax_plugin_ray.trainer import TrainerGroup

GRACE_S = 4.0
"""How long a role may take to end by itself."""


class RayRuntime(Runtime):
    """Starts the roles that a run needs, and ends them. The controller is the process that holds this object."""

    Config = RayConfig
    config: RayConfig

    @classmethod
    def check(cls, config: RayConfig, run: RunConfig) -> Iterable[str]:
        yield from problems(config, run)

    def __init__(self, config: RayConfig) -> None:
        super().__init__(config)
        self._cluster: Cluster | None = None
        self._engine: Router | None = None
        self._trainers: list[TrainerGroup] = []
        self._stages: list[RemoteStage] = []
        self._pools: list[Pool] = []
        self._engine_actors: list[Any] = []
        self._visitors: list[Pool] = []
        """Whose actors ask the engines themselves."""
        self._players: Any = None
        self._graders: Any = None

    # --- start --------------------------------------------------------------------------------------------------------

    async def start(self, run: Run, note: Note, training: bool = True) -> Roles:
        from relax_plugin_ray.bus import RayBus
        from relax_plugin_ray.cluster import Cluster
        from relax_plugin_ray.plays import RayGraders, RayPlayers
        from relax_plugin_ray.worker import adapter_of

        algorithm = build_algorithm(run)
        others = needed_others(self.config, run.config, run.stack, algorithm) if training else []
        cluster = self._cluster = await Cluster.attach(self.config, run, others, note)
        adapter, media = adapter_of(run)
        room = (run.config.bus.max_rows, run.config.bus.max_bytes)
        bus = RayBus.start(*room, media, run.directory.absolute(), **cluster.options("bus", 0))
        plain = resolved(run.config, run.stack) | {"runs": str(run.config.runs.absolute())}
        engines = self._engines(plain, run, media)
        engine = self._engine = Router(engines, note, max_restarts=self.config.restarts)
        policy = self._ranks("policy", plain, media)
        trainer: Trainer = policy
        if CRITIC in others:
            trainer = ActorCritic(policy, self._ranks("critic", plain, media))
        players = self._environments(plain, bus, note)
        graders = self._grading(plain, run, note)
        old_policy = self._old_policy(plain, media, note) if OLD_POLICY in others else TrainerItself(trainer)
        placed = {
            name: self._stage(name, plain, run, bus, note) for name in others if name not in (OLD_POLICY, *ASKING)
        }
        environments = build_environments(run)
        deterministic = self._deterministic(run)
        self._players = RayPlayers(players, engine, bus, media, announce=deterministic)
        self._graders = RayGraders(graders)
        await asyncio.gather(
            engine.start(),
            *(group.start() for group in self._trainers),
            *(pool.start(self.config.start_s) for pool in self._pools),
            *(stage.start() for stage in self._stages),
        )
        if training:
            placed |= self._asking(run, algorithm, adapter, media, trainer)
        return Roles(
            engine=engine,
            trainer=trainer,
            publish=policy.publish,
            bus=bus,
            players=self._players,
            graders=self._graders,
            stages=placed,
            environments=environments,
            adapter=adapter,
            media=media,
            old_policy=old_policy,
            colocated=self.config.placement == "colocate",
        )

    def _deterministic(self, run: Run) -> bool:
        """Batches of one engine can be made independent of timing; over several, requests spread by it."""
        return run.config.max_staleness == 0 and self.config.roles.engine.replicas == 1

    # --- roles --------------------------------------------------------------------------------------------------------

    def _engines(self, plain: dict[str, object], run: Run, media: SharedMedia) -> list[RayEngine]:
        from relax_plugin_ray.engine import RayEngine, RunBuilder, engine_actor

        def owner(index: int) -> RayEngine:
            cores = cores_of(self.config.roles.engine.cores, index)
            builder = RunBuilder(plain, f"engine-{index}", self._deterministic(run), cores)

            def create() -> Any:
                actor = engine_actor(builder, **self._options("engine", index))
                self._engine_actors[index] = actor
                for pool in self._visitors:
                    pool.tell("engine_is", index, actor)
                return actor

            return RayEngine.spawn(create, media)

        self._engine_actors = [None] * self.config.roles.engine.replicas
        return [owner(index) for index in range(len(self._engine_actors))]

    def _ranks(self, learner: LearnerName, plain: dict[str, object], media: SharedMedia) -> TrainerGroup:
        from relax_plugin_ray.plays import actor_of
        from relax_plugin_ray.rank import RankActor
        from relax_plugin_ray.trainer import TrainerGroup

        role = CRITIC if learner == "critic" else "trainer"
        own: Ranks = getattr(self.config.roles, role)
        size = own.ranks

        def create(rank: int) -> Any:
            options = self._options(role, rank)
            about = (rank, size, self._transport(), learner, cores_of(own.cores, rank))
            return actor_of(RankActor, **options)(plain, f"{role}-{rank}", *about)

        self._trainers.append(TrainerGroup(create, size, media, start_s=self.config.start_s, role=role))
        return self._trainers[-1]

    def _environments(self, plain: dict[str, object], bus: RayBus, note: Note) -> Pool:
        from relax_plugin_ray.plays import EnvironmentActor, actor_of
        from relax_plugin_ray.pool import Pool

        def create(index: int) -> Any:
            options = self._options("environments", index)
            return actor_of(EnvironmentActor, **options)(plain, f"environments-{index}", self._engine_actors, bus)

        pool = Pool("environments", create, self.config.roles.environments.replicas, self.config.restarts, note)
        self._pools.append(pool)
        self._visitors.append(pool)
        return pool

    def _grading(self, plain: dict[str, object], run: Run, note: Note) -> Pool:
        from relax_plugin_ray.plays import GraderActor, actor_of
        from relax_plugin_ray.pool import Pool

        asking, deterministic = asks_policy(run.config, run.stack), self._deterministic(run)

        def create(index: int) -> Any:
            engines = self._engine_actors if asking else []
            options = self._options("graders", index)
            return actor_of(GraderActor, **options)(plain, f"graders-{index}", engines, deterministic)

        pool = Pool("graders", create, self.config.roles.graders.replicas, self.config.restarts, note)
        self._pools.append(pool)
        if asking:
            self._visitors.append(pool)
        return pool

    def _old_policy(self, plain: dict[str, object], media: SharedMedia, note: Note) -> RemoteOldPolicy:
        from relax_plugin_ray.old_policy import OldPolicyActor, RemoteOldPolicy
        from relax_plugin_ray.plays import actor_of

        def create(index: int) -> Any:
            return actor_of(OldPolicyActor, **self._options(OLD_POLICY, index))(plain, f"{OLD_POLICY}-{index}")

        old_policy = RemoteOldPolicy(create, self.config.roles.old_policy.replicas, self.config.restarts, note, media)
        self._pools.append(old_policy.pool)
        return old_policy

    def _stage(self, name: str, plain: dict[str, object], run: Run, bus: RayBus, note: Note) -> Placed:
        from relax_plugin_ray.plays import actor_of
        from relax_plugin_ray.stages import RemoteStage, StageActor, state_of

        def create(index: int) -> Any:
            return actor_of(StageActor, **self._options(name, index))(plain, f"{name}-{index}", name, bus)

        replicas = self.config.roles.stages.get(name, Replicas()).replicas
        state = state_of(run, name)
        stage = RemoteStage(name, create, state, replicas, self.config.restarts, note, self.config.start_s)
        self._stages.append(stage)
        return stage

    def _asking(
        self, run: Run, algorithm: Algorithm, adapter: ModelAdapter, media: SharedMedia, trainer: Trainer
    ) -> dict[str, Placed]:
        """The stages that only pass rows on to a role."""
        if values_in_step(algorithm, self.config.placement == "colocate"):
            return {}
        plans, _ = planned_stages(run.config, run.stack, algorithm)
        apart = old_policy_apart(self.config, run.config, algorithm)
        found = {
            plan.section.id: annotator(plan, run, algorithm, adapter, media, trainer, old_apart=apart)
            for plan in plans
            if plan.section.id in ASKING
        }
        return {name: Here(stage, name) for name, stage in found.items()}

    def _options(self, role: str, index: int) -> dict[str, Any]:
        return self._built.options(role, index)

    @property
    def _built(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    def _transport(self) -> str:
        """Shared memory reaches the processes of one machine only."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return "shared" if sum(node["Alive"] for node in nodes) == 1 else "tcp"

    def actors(self) -> dict[str, Any]:
        """Of the roles that may be started again: ``<role>-<index>`` -> the actor that is there now."""
        found = {"engine": self._engine_actors}
        found |= {pool.role: pool.actors for pool in self._pools}
        found |= {stage.name: stage.actors for stage in self._stages}
        return {f"{role}-{i}": actor for role, actors in found.items() for i, actor in enumerate(actors)}

    # --- end ----------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Whatever state the roles are in; what cannot end by itself is killed."""
        for role in (self._players, self._graders):
            if role is not None:
                with suppress(Exception):
                    await asyncio.wait_for(role.close(), GRACE_S)
        for pool in self._pools:
            pool.stop()
        for stage in self._stages:
            stage.stop()
        if self._engine is not None:
            with suppress(Exception):
                await asyncio.wait_for(self._engine.stop(), GRACE_S)
        stops = (asyncio.wait_for(group.stop(), GRACE_S) for group in self._trainers)
        await asyncio.gather(*stops, return_exceptions=True)
        if self._cluster is not None:
            await self._cluster.release()
            self._cluster = None
