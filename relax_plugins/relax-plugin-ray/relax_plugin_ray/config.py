"""Settings of the runtime ``ray``, apart from its code: reading a run file imports no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from relax_core.interfaces import ComponentConfig
from relax_core.runtime_config import Deployed

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.plugins import Stack


def _whole_above_one(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"found {gpus:g}: a part of a GPU is less than 1, several are a whole number")
    return gpus


Gpus = Annotated[NonNegativeFloat, AfterValidator(_whole_above_one)]


Cores = tuple[Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)], ...]


def cores_of(cores: Cores, index: int) -> tuple[int, ...]:
    """Those of a role's process with this number; none: it may run on any."""
    return cores[index % len(cores)] if cores else ()


class Replicas(ComponentConfig):
    """A role of equal processes beside each other."""

    replicas: PositiveInt = 1
    """How many."""
    cpus: NonNegativeFloat = 1.0
    """Of each, as Ray counts them."""
    gpus: Gpus = 0.0
    """Of each; parts of one may be shared."""


class Engines(Replicas):
    """Engines, which must not wait for a core where few cores have much to do."""

    cores: Cores = ()
    """CPU cores on which each engine's process runs, a list for each (they take turns where there are fewer lists), by
    their numbers on its machine; default: any. Keep the others away with ``taskset`` before ``relax train``. Linux."""


class Ranks(ComponentConfig):
    """A trainer, of policy or critic: one process group."""

    ranks: PositiveInt = 1
    """Processes that train together."""
    cpus: NonNegativeFloat = 1.0
    """Of each rank, as Ray counts them."""
    gpus: Gpus = 0.0
    """Of each rank."""
    cores: Cores = ()
    """CPU cores on which each rank runs, as for engines."""


class Roles(ComponentConfig):
    """What each role gets. Roles that the run does not need are not started."""

    engine: Engines = Engines()
    """Sampling. Several replicas stand behind a router."""
    trainer: Ranks = Ranks()
    """Gradients of the policy."""
    critic: Ranks = Ranks()
    """Gradients and values of the critic, where the algorithm has one."""
    environments: Replicas = Replicas()
    """Plays tasks: environments and their tools."""
    graders: Replicas = Replicas()
    """Rewards."""
    old_policy: Replicas = Replicas()
    """Log-probs under the policy at the start of the step, where they are computed (``updates_per_step`` above 1, or an
    algorithm that asks for them) and ``placement`` is ``separate``; elsewhere the trainer computes them."""
    stages: dict[str, Replicas] = {}
    """By the stage's id (reference, teacher, advantages, ...); default: one process without a GPU."""
    bus: Replicas = Replicas()
    """Rows on their way: always one process."""


class RayConfig(ComponentConfig):
    address: str | None = None
    """Of a running cluster: ``host:port``, or ``auto`` for the one that this machine is a node of; default: one is
    started on this machine and ended with the run. Ray's own RAY_ADDRESS is not read."""
    placement: Literal["separate", "colocate", "hybrid"] = "separate"
    """``separate``: every role has devices of its own, and they overlap. ``colocate``: engines and trainer take turns
    on the same devices; the one that waits frees its memory. ``hybrid``: as separate, with the stages that run a model
    on the trainer's devices, and the old policy's log-probs computed by the trainer."""
    roles: Roles = Roles()
    """How many processes each role has, and what each of them gets."""
    restarts: NonNegativeInt = 5
    """How often a process of a role that can go on without its past (an engine, an environment, a grader, the old
    policy, a stage) is started again within ten minutes; one more ends the run."""
    start_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds in which the cluster must have room for a role and its processes must be ready."""

    # --- what ``relax check`` asks ------------------------------------------------------------------------------------

    def problems(self, run: RunConfig, stack: Stack) -> Iterable[str]:
        """See ``LocalConfig``."""
        from relax_plugin_ray import checks

        return checks.problems(self, run, stack)

    def deployment(self, run: RunConfig, stack: Stack) -> Iterable[tuple[str, str]]:
        """See ``LocalConfig``."""
        from relax_plugin_ray import checks

        return checks.deployment(self, run, stack)

    def notes(self, run: RunConfig, stack: Stack) -> Iterable[str]:
        """See ``LocalConfig``."""
        from relax_plugin_ray import checks

        return checks.notes(self, run, stack)

    def deployed(self) -> Deployed:
        """See ``LocalConfig``."""
        engine, trainer, critic = self.roles.engine, self.roles.trainer, self.roles.critic
        together: Literal["turns", "apart"] = "turns" if self.placement == "colocate" else "apart"
        sizes = (engine.replicas, trainer.ranks, together, engine.gpus, trainer.gpus, self.address is None)
        old_policy = self.roles.old_policy.gpus if self.placement == "separate" else None
        return Deployed(*sizes, old_policy_gpus=old_policy, critic_ranks=critic.ranks, critic_gpus=critic.gpus)
