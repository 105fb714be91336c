"""Which roles a run needs, what each gets, and where they sit: without Ray, so that ``relax check`` can say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from relax_core.config.columns import planned_stages, values_in_step
from relax_core.interfaces import VALUES, Streaming
from relax_core.old_policy import recomputes_old
from relax_plugin_ray.config import Ranks, RayConfig, Replicas

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm
    from relax_core.plugins import Stack

ADVANTAGES = "advantages"
OLD_POLICY = "old_policy"
CRITIC = "critic"
RANKED = ("trainer", CRITIC)
"""Roles that are one process group."""
ASKING = frozenset({CRITIC})
"""Stages that only pass rows on to the role of this name: they live in the controller."""
LEAST_CPU = 0.001
"""Of a bundle for a role that asks for nothing: Ray has no empty ones."""


@dataclass(frozen=True, slots=True)
class Need:
    """A role that a run needs: so many processes, each with so much. ``model``: a stage that runs a model."""

    role: str
    processes: int
    cpus: float
    gpus: float
    model: bool = False

    def __str__(self) -> str:
        each = count(self.cpus, "CPU") + (f" and {count(self.gpus, 'GPU')}" if self.gpus else "")
        if self.processes == 1:
            return f"1 {'rank' if self.role in RANKED else 'process'}, {each}"
        return f"{self.processes} {'ranks' if self.role in RANKED else 'processes'}, each {each}"


class Seat(NamedTuple):
    """Where a process of a role sits, and its part of what is there."""

    group: str
    bundle: int
    cpus: float
    gpus: float


@dataclass(slots=True)
class Layout:
    """Placement groups by name, each a strategy and its bundles (CPUs, GPUs); and a seat for (role, index)."""

    strategies: dict[str, Literal["PACK", "SPREAD"]] = field(default_factory=dict)
    bundles: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    seats: dict[tuple[str, int], Seat] = field(default_factory=dict)

    def total(self) -> tuple[float, float]:
        """CPUs and GPUs of all."""
        every = [bundle for bundles in self.bundles.values() for bundle in bundles]
        return sum(cpus for cpus, _ in every), sum(gpus for _, gpus in every)


# --- what is needed ---------------------------------------------------------------------------------------------------


def needed_stages(config: RayConfig, run: RunConfig, stack: Stack, algorithm: Algorithm) -> list[str]:
    """What an algorithm asks for: the critic, and the stages between scoring and training that have processes."""
    plans, _ = planned_stages(run, stack, algorithm)
    critic = [CRITIC] * bool(algorithm.outputs & VALUES)
    found = critic + [plan.section.id for plan in plans if plan.section.id not in ASKING]
    in_step = algorithm.streaming is Streaming.BATCH or values_in_step(algorithm, config.placement == "colocate")
    return found if in_step else [*found, ADVANTAGES]


def old_policy_apart(config: RayConfig, run: RunConfig, algorithm: Algorithm) -> bool:
    """Whether the old policy is a role with processes of its own; else the trainer is it."""
    return config.placement == "separate" and recomputes_old(run, algorithm)


def needed_others(config: RayConfig, run: RunConfig, stack: Stack, algorithm: Algorithm) -> list[str]:
    """The roles that this algorithm asks for: the old policy, the critic, and stages."""
    old = [OLD_POLICY] if old_policy_apart(config, run, algorithm) else []
    return [*old, *needed_stages(config, run, stack, algorithm)]


def needed_roles(config: RayConfig, run: RunConfig, stack: Stack, others: Sequence[str]) -> list[Need]:
    """Every role that is started, these ``others`` among them, in the order in which they get their places."""
    roles = config.roles
    trainer, critic = (_ranked(role, config) for role in RANKED)
    fixed = {name: getattr(roles, name) for name in ("engine", "environments", "graders", "bus")}
    needs = [trainer, *(Need(name, own.replicas, own.cpus, own.gpus) for name, own in fixed.items())]
    for name in others:
        own = roles.old_policy if name == OLD_POLICY else roles.stages.get(name, Replicas())
        model = name == OLD_POLICY or runs_model(name, run, stack)
        other = Need(name, own.replicas, own.cpus, own.gpus, model)
        needs.append(critic if name == CRITIC else other)
    return needs


def _ranked(role: str, config: RayConfig) -> Need:
    own: Ranks = getattr(config.roles, role)
    return Need(role, own.ranks, own.cpus, own.gpus)


def runs_model(stage: str, run: RunConfig, stack: Stack) -> bool:
    """Whether a stage's settings name a model."""
    if stage not in stack.components("stages"):
        return False
    return "model" in stack.config_class("stages", stage, f"stages.{stage}").model_fields


# --- where it sits ----------------------------------------------------------------------------------------------------


def layout(config: RayConfig, needs: Sequence[Need]) -> Layout:
    """A placement group for each role; roles that share devices share bundles, and each asks for its part of them."""
    found = Layout()
    by_role = {need.role: need for need in needs}
    trainer, engine = by_role["trainer"], by_role["engine"]
    shared: list[list[tuple[Need, int]]] = [[(trainer, i)] for i in range(trainer.processes)]
    beside = [need for need in needs if config.placement == "hybrid" and need.model]
    if config.placement == "colocate":
        shared += [[] for _ in range(engine.processes - trainer.processes)]
        beside = [engine, *(by_role[role] for role in (CRITIC,) if role in by_role)]
    for need in beside:
        for i in range(need.processes):
            shared[i % len(shared)].append((need, i))
    name = "+".join(["trainer", *(need.role for need in beside)])
    found.strategies[name], found.bundles[name] = "PACK", []
    for i, guests in enumerate(shared):
        turns = config.placement == "colocate"  # then they work one at a time, and share CPUs too
        cpus = (max if turns else sum)(need.cpus for need, _ in guests)
        gpus = max(need.gpus for need, _ in guests)
        found.bundles[name].append(_some(cpus, gpus))
        for need, index in guests:
            own = cpus / len(guests) if turns else need.cpus
            found.seats[need.role, index] = Seat(name, i, own, gpus / len(guests))
    for need in needs:
        if need is trainer or need in beside:
            continue
        found.strategies[need.role] = "SPREAD" if need is engine else "PACK"
        found.bundles[need.role] = [_some(need.cpus, need.gpus)] * need.processes
        for i in range(need.processes):
            found.seats[need.role, i] = Seat(need.role, i, need.cpus, need.gpus)
    return found


def _some(cpus: float, gpus: float) -> tuple[float, float]:
    return (cpus, gpus) if cpus or gpus else (LEAST_CPU, 0.0)


def count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def whole_cpus(seats: Layout) -> int:
    """Logical CPUs that a cluster for this alone must have."""
    return math.ceil(seats.total()[0])
