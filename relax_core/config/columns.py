"""Which stages a run has: those that make the columns its algorithm needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.config.schema import ComponentSection
from relax_core.errors import ConfigError, RelaxError, nearest
from relax_core.interfaces import TRAINER_COLUMNS, VALUES

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm, Component
    from relax_core.plugins import Stack

NESTED = {"model": "models", "engine": "engines"}
"""Settings of a stage or a reward that are component sections, as the run file's fields of the same name are, and
their kinds."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage to build: its section of the run file (or its defaults), and what it is to make."""

    where: str
    section: ComponentSection
    columns: frozenset[str]


def planned_stages(run: RunConfig, stack: Stack, algorithm: Algorithm) -> tuple[list[StagePlan], list[str]]:
    """The stages between sampling and training in a fixed order, and a line for each thing that is wrong with them.

    A column that several stages make comes from the one that the run file lists.
    """
    known = stack.components("stages")
    listed = {section.id: (f"stages.{i}", section) for i, section in enumerate(run.stages) if section.id in known}
    chosen: dict[str, set[str]] = {}
    found: list[str] = []
    for column in sorted(algorithm.needs - TRAINER_COLUMNS):
        maker = _maker(column, known, listed, f"algorithm: {run.algorithm.id}")
        if isinstance(maker, ConfigError):
            found += maker.problems
        else:
            chosen.setdefault(maker, set()).add(column)
    plans = []
    for id in sorted(chosen):
        where, section = listed.get(id, (f"stages.{id}", ComponentSection(id=id)))
        plans.append(StagePlan(where, section, frozenset(chosen[id])))
    found += _misplaced(run, known, frozenset(chosen))
    for where, section in listed.values():
        found += nested_problems("stages", section, stack, where)
    for plan in plans:
        if plan.section.id not in listed:
            found += _unlisted(plan, stack, run.algorithm.id)
    return plans, found


def values_in_step(algorithm: Algorithm, colocated: bool) -> bool:
    """Whether the training step itself makes ``values``, and credit of them, instead of stages before it.

    So it is where trainer and engine take turns: the critic sleeps until all plays of the step are there.
    """
    return colocated and bool(VALUES & algorithm.needs & algorithm.outputs)


def _maker(column: str, known: Mapping[str, Component], listed: Mapping[str, object], who: str) -> str | ConfigError:
    """The id of the stage that makes a column, or why there is none."""
    makers = [id for id, component in known.items() if column in component.makes]
    preferred = [id for id in makers if id in listed] or makers
    if len(preferred) == 1:
        return preferred[0]
    if makers:
        advice = "keep one of them" if preferred[0] in listed else "list one of them under stages"
        return ConfigError(f"{who} needs the column {column!r}: {' and '.join(preferred)} make it; {advice}")
    made = {*TRAINER_COLUMNS, *(name for component in known.values() for name in component.makes)}
    hint = nearest(column, made)
    return ConfigError(f"{who} needs the column {column!r}, which no stage makes{hint}: list its plugin")


def _misplaced(run: RunConfig, known: Mapping[str, Component], chosen: frozenset[str]) -> Iterator[str]:
    """Listed stages that nothing needs, or that are listed twice."""
    first: dict[str, int] = {}
    for i, section in enumerate(run.stages):
        if section.id not in known:
            continue  # reported by path already
        if first.setdefault(section.id, i) != i:
            yield f"stages.{i}: {section.id} is listed already, as stages.{first[section.id]}: leave one out"
        elif section.id not in chosen:
            makes = ", ".join(sorted(known[section.id].makes)) or "nothing"
            yield (
                f"stages.{i}: {section.id} makes {makes}, which {run.algorithm.id} with its settings does not need: "
                "remove it, or set what needs it"
            )


def _unlisted(plan: StagePlan, stack: Stack, algorithm: str) -> Iterator[str]:
    """What is wrong with a stage that is needed and not listed, and so has its defaults: some settings have none."""
    id = plan.section.id
    fields = stack.config_class("stages", id, plan.where).model_fields
    if required := [name for name, field in fields.items() if field.is_required()]:
        shown = ", ".join(f"{name}: {'{...}' if name in NESTED else '...'}" for name in required)
        yield (
            f"stages: {algorithm} needs {' and '.join(sorted(plan.columns))} of the stage {id!r}, whose "
            f"{' and '.join(required)} must be given: write stages: [{{id: {id}, {shown}}}]"
        )
    else:
        yield from nested_problems("stages", plan.section, stack, plan.where)


def nested_problems(kind: str, section: ComponentSection, stack: Stack, where: str) -> Iterator[str]:
    """What is wrong with the settings of a stage or a reward, those of a component that they name included."""
    try:
        config = stack.config(kind, section, where)
        for name, inner in NESTED.items():
            nested = getattr(config, name, None)
            if isinstance(nested, ComponentSection):
                stack.config(inner, nested, f"{where}.{name}")
    except RelaxError as error:
        yield from error.problems if isinstance(error, ConfigError) else (str(error),)
