"""What ``relax check`` says of a run on a cluster: its plan, what is perhaps not meant, and what cannot work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from relax_core.errors import nearest
from relax_core.old_policy import recomputes_old
from relax_core.runtime_config import overlap_of
from relax_core.scoring import asks_policy
from relax_plugin_ray.config import Ranks, RayConfig, Replicas
from relax_plugin_ray.plan import (
    ADVANTAGES,
    ASKING,
    CRITIC,
    OLD_POLICY,
    RANKED,
    count,
    layout,
    needed_others,
    needed_roles,
    needed_stages,
    old_policy_apart,
    runs_model,
)

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm
    from relax_core.plugins import Stack

DEVICES = (("engine", "engine", "engines"), ("trainer", "trainer", "trainers"), (CRITIC, "trainer", "trainers"))
"""Roles with the section of the run file that says on which device they compute, and its kind."""

# --- the plan ---------------------------------------------------------------------------------------------------------


def _algorithm(run: RunConfig, stack: Stack) -> Algorithm | None:
    """None where its class imports heavy packages."""
    if not stack.is_light("algorithms", run.algorithm.id):
        return None
    algorithm: Algorithm = stack.build("algorithms", run.algorithm, where="algorithm")
    return algorithm


def deployment(config: RayConfig, run: RunConfig, stack: Stack) -> Iterator[tuple[str, str]]:
    """(what, how): the cluster, each role and its place, and what overlaps."""
    algorithm = _algorithm(run, stack)
    others = needed_others(config, run, stack, algorithm) if algorithm is not None else []
    needs = needed_roles(config, run, stack, others)
    seats = layout(config, needs)
    cpus, gpus = seats.total()
    which = f"the one at {config.address}" if config.address else "started on this machine, ended with the run"
    yield "cluster", f"{which}; placement {config.placement}, {count(cpus, 'CPU')} and {count(gpus, 'GPU')} in all"
    for need in needs:
        group = seats.seats[need.role, 0].group
        others = [other for other in group.split("+") if other != need.role]
        where = f", sharing with {' and '.join(others)}" if others else ""
        spread = ", spread over nodes" if seats.strategies[group] == "SPREAD" and need.processes > 1 else ""
        yield f"role {need.role}", f"{need}{where}{spread}"
    if algorithm is None:
        yield "role of stages", f"those that {run.algorithm.id} needs are known only when its heavy packages are loaded"
    if config.placement == "colocate":
        yield "overlap", "engines and trainer take turns on the same devices; the side that waits frees its memory"
    else:
        yield "overlap", overlap_of(run)


def notes(config: RayConfig, run: RunConfig, stack: Stack) -> Iterator[str]:
    """What works, but is perhaps not meant."""
    algorithm, roles = _algorithm(run, stack), config.roles
    if algorithm is not None:
        yield from _of_the_old_policy(config, run, algorithm)
        needed = needed_stages(config, run, stack, algorithm)
        known = {*stack.components("stages"), ADVANTAGES}
        for name in roles.stages:
            if name in ASKING:
                yield f"roles.stages.{name}: it only asks the role {name}, which roles.{name} sizes"
            elif name in known and name not in needed:
                yield f"roles.stages.{name}: {run.algorithm.id} with its settings does not need it; it is not started"
        if roles.critic != Ranks() and CRITIC not in needed:
            yield f"roles.{CRITIC}: {run.algorithm.id} has no critic; it is not started"
        if config.placement == "hybrid" and not any(runs_model(name, run, stack) for name in needed):
            yield "placement: hybrid, but no stage of this run has a model: it is as separate"
    if asks_policy(run, stack) and roles.graders.replicas > 1 and run.max_staleness == 0:
        yield (
            "roles.graders.replicas: a reward asks the engine, and graders ask at once: which of their questions are "
            "decoded together depends on timing, and in the last bit so may answers; 1 repeats exactly"
        )
    for role, section, kind in DEVICES:
        if _device(run, stack, kind, section) == "cpu" and getattr(roles, role).gpus:
            id = getattr(run, section).id
            yield f"roles.{role}.gpus: {id} is told to use the CPU ({section}.device), so its GPUs are idle"


def _of_the_old_policy(config: RayConfig, run: RunConfig, algorithm: Algorithm) -> Iterator[str]:
    own, trainer = config.roles.old_policy, config.roles.trainer
    if old_policy_apart(config, run, algorithm):
        if trainer.gpus and not own.gpus:
            yield (
                f"roles.{OLD_POLICY}.gpus: found 0, but the trainer has GPUs: the old policy computes on a CPU, "
                "and the trainer waits for it; give it some, such as 1, or take placement hybrid, where the trainer "
                "computes old log-probs"
            )
    elif own != Replicas():
        if recomputes_old(run, algorithm):
            why = f"in placement {config.placement} the trainer computes old log-probs"
        else:
            why = f"{run.algorithm.id} with its settings needs no old log-probs"
        yield f"roles.{OLD_POLICY}: {why}; nothing is started for it"


# --- what cannot work -------------------------------------------------------------------------------------------------


def problems(config: RayConfig, run: RunConfig, stack: Stack | None = None) -> Iterable[str]:
    """One line for each thing that cannot work: where, what was found, what to do. ``stack``: to know components."""
    roles = config.roles
    if roles.bus.replicas != 1:
        yield f"roles.bus.replicas: found {roles.bus.replicas}, but a run has one bus: leave it out"
    if run.transport is not None and run.transport.id == "copy":
        yield "id: ray with transport 'copy', which stays in one process: take another transport, or leave it out"
    if config.address is not None and (line := _wrong_address(config.address)):
        yield f"address: found {config.address!r}: {line}"
    if config.placement == "colocate":
        yield from _colocated(config)
    if stack is not None:
        yield from _of_components(config, run, stack)


def _wrong_address(address: str) -> str | None:
    if address == "auto":
        return None
    if address.startswith("ray://"):
        return (
            "Ray Client has no shared memory with the cluster: start the run on one of its nodes, with address: auto "
            "or host:port (of `ray start --head`, by default port 6379)"
        )
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
        return "write host:port as `ray start --head` says it, or auto for the cluster that this machine is a node of"
    return None


def _colocated(config: RayConfig) -> Iterator[str]:
    engine, trainer = config.roles.engine, config.roles.trainer
    if not engine.gpus and not trainer.gpus:
        return
    if (engine.replicas, engine.gpus) != (trainer.ranks, trainer.gpus):
        yield (
            f"roles: placement colocate, engine {engine.replicas} x {count(engine.gpus, 'GPU')} and trainer "
            f"{trainer.ranks} x {count(trainer.gpus, 'GPU')}, but a replica and a rank share each device: "
            "give both the same numbers, or take placement separate"
        )
    elif engine.gpus > 1:
        yield (
            f"roles: placement colocate with {engine.gpus:g} GPUs for a process, of which two share one: ask for 1 "
            "GPU each and for more replicas and ranks, or take placement separate"
        )


def _colocated_critic(config: RayConfig) -> Iterator[str]:
    trainer, critic = config.roles.trainer, config.roles.critic
    if (trainer.gpus or critic.gpus) and (critic.ranks, critic.gpus) != (trainer.ranks, trainer.gpus):
        yield (
            f"roles: placement colocate, trainer {trainer.ranks} x {count(trainer.gpus, 'GPU')} and critic "
            f"{critic.ranks} x {count(critic.gpus, 'GPU')}, but a rank of each shares each device: give both the same "
            "numbers, or take placement separate"
        )


def _one_rank(role: str, config: RayConfig, run: RunConfig) -> str:
    return (
        f"roles.{role}.ranks: found {getattr(config.roles, role).ranks}, but trainer {run.trainer.id!r} trains in one "
        "process: leave it out, or take trainer torch"
    )


def _of_components(config: RayConfig, run: RunConfig, stack: Stack) -> Iterator[str]:
    """What only those who know the components can see. The Config of a trainer of many ranks has ``over_ranks``."""
    roles, known = config.roles, {*stack.components("stages"), ADVANTAGES}
    for name in roles.stages:
        if name not in known:
            near = nearest(name, known) or f"; known are {', '.join(sorted(known))}"
            yield f"roles.stages.{name}: no stage has this id{near}"
    algorithm = _algorithm(run, stack)
    needed = [] if algorithm is None else needed_stages(config, run, stack, algorithm)
    trainer = stack.config_class("trainers", run.trainer.id, "trainer")
    for role, section, kind in DEVICES:
        if role == CRITIC and CRITIC not in needed:
            continue
        if role in RANKED and getattr(roles, role).ranks > 1 and not getattr(trainer, "over_ranks", False):
            yield _one_rank(role, config, run)
        if _device(run, stack, kind, section) == "cuda" and not getattr(roles, role).gpus:
            yield f"roles.{role}.gpus: found 0, but {section}.device is cuda: give it some, such as 1"
    if config.placement == "colocate" and CRITIC in needed:
        yield from _colocated_critic(config)
    if config.placement == "hybrid" and algorithm is not None:
        yield from _beside_the_trainer(config, run, stack, needed)


def _beside_the_trainer(config: RayConfig, run: RunConfig, stack: Stack, stages: Sequence[str]) -> Iterator[str]:
    sharing = [name for name in stages if runs_model(name, run, stack)]
    for name in sharing:
        if config.roles.stages.get(name, Replicas()).gpus:
            yield (
                f"roles.stages.{name}.gpus: placement hybrid puts it on the trainer's devices: leave gpus out, or take "
                "placement separate"
            )
    if sharing and config.roles.trainer.gpus > 1:
        yield (
            f"roles.trainer.gpus: found {config.roles.trainer.gpus:g}, but in placement hybrid a rank shares its "
            f"device with {' and '.join(sharing)}: ask for 1 GPU a rank and for more ranks"
        )


def _device(run: RunConfig, stack: Stack, kind: str, role: str) -> str | None:
    """What the settings of the engine or the trainer say, if they say it."""
    device = getattr(stack.config(kind, getattr(run, role), role), "device", None)
    return device if isinstance(device, str) else None
