"""Rules that span several fields of a run file; each broken one is a line that says where, what, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from relax_core.errors import nearest

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig


def broken_rules(run: RunConfig) -> Iterator[str]:
    """Every rule that ``run`` breaks, those of its components aside."""
    yield from _labels(run)
    yield from _sampling(run)
    yield from _updates(run)
    yield from _rewards(run)
    yield from _evaluations(run)
    yield from _bus(run)


def _labels(run: RunConfig) -> Iterator[str]:
    named: list[tuple[str, Iterable[str], str]] = [
        ("environments", (e.label for e in run.environments), "give one of them a name"),
        ("rewards", (r.label for r in run.rewards), "give one of them a name"),
        ("evaluation", (e.name for e in run.evaluation), "rename one"),
    ]
    for where, labels, advice in named:
        for label, count in Counter(labels).items():
            if count > 1:
                yield f"{where}: {count} are called {label!r}; {advice}"


def _sampling(run: RunConfig) -> Iterator[str]:
    sampling = run.sampling
    why = "a training rollout must sample from the distribution that is trained"
    if sampling.top_p < 1:
        yield f"sampling.top_p: found {sampling.top_p}; {why}: leave it at 1 (evaluations may set it)"
    if sampling.top_k > 0:
        yield f"sampling.top_k: found {sampling.top_k}; {why}: leave it at 0 (evaluations may set it)"
    if sampling.temperature == 0:
        yield (
            "sampling.temperature: found 0; greedy plays of a task are all alike and teach nothing: "
            "set it above 0 (evaluations may be greedy)"
        )


def _updates(run: RunConfig) -> Iterator[str]:
    if run.updates_per_step % run.epochs:
        yield (
            f"epochs: found {run.epochs}; it must divide updates_per_step ({run.updates_per_step}), "
            "which counts mini-batches x epochs"
        )
        return
    mini_batches = run.updates_per_step // run.epochs
    if mini_batches > run.groups_per_step:
        yield (
            f"updates_per_step: found {run.updates_per_step}, which cuts a step into {mini_batches} mini-batches, but "
            f"it has only {run.groups_per_step} groups: lower it, or raise epochs or groups_per_step"
        )


def _rewards(run: RunConfig) -> Iterator[str]:
    environments = [e.label for e in run.environments]
    for reward in run.rewards:
        for name in reward.environments or ():
            if name not in environments:
                yield _unknown(f"rewards.{reward.label}.environments", "environment", name, environments)
        if reward.environments == ():
            yield f"rewards.{reward.label}.environments: is empty, so it scores nothing; leave it out to score all"
    for name in environments:
        if not any(reward.environments is None or name in reward.environments for reward in run.rewards):
            yield f"environments.{name}: no reward scores it; name it under a reward's environments"


def _evaluations(run: RunConfig) -> Iterator[str]:
    environments = [e.label for e in run.environments]
    rewards = {r.label: r for r in run.rewards}
    for section in run.evaluation:
        where = f"evaluation.{section.name}"
        if section.environment not in environments:
            yield _unknown(f"{where}.environment", "environment", section.environment, environments)
            continue
        judge = section.correct or run.rewards[0].label
        if judge not in rewards:
            yield _unknown(f"{where}.correct", "reward", judge, list(rewards))
        elif section.environment not in (rewards[judge].environments or environments):
            default = "" if section.correct else ", the first reward, which is the default,"
            yield (
                f"{where}.correct: reward {judge!r}{default} does not score environment {section.environment!r}; "
                "name one that does"
            )
        if section.n > 1 and (section.sampling is None or section.sampling.temperature == 0):
            yield (
                f"{where}.n: found {section.n} with sampling.temperature 0; greedy plays of a task are all alike: "
                "set n to 1, or the temperature above 0"
            )


def _bus(run: RunConfig) -> Iterator[str]:
    """Rows leave the bus when a checkpoint covers their step: until then the bus must have room for new ones."""
    steps = min(run.checkpoint.every, run.steps) + run.max_staleness + 1
    least = steps * run.groups_per_step * run.group_size
    if run.bus.max_rows < least:
        yield (
            f"bus.max_rows: found {run.bus.max_rows}; rows are held until a checkpoint covers their step, so it needs "
            f"(checkpoint.every + max_staleness + 1) x groups_per_step x group_size = {least} or more: "
            "raise it, or lower checkpoint.every"
        )


def _unknown(where: str, kind: str, name: str, known: Sequence[str]) -> str:
    hint = nearest(name, known) or f"; there are {', '.join(known)}"
    return f"{where}: no {kind} is called {name!r}{hint}"
