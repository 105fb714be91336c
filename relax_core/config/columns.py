"""Which stages a run has: those that make the columns its algorithm needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.config.schema import ComponentSection
from relax_core.errors import nearest
from relax_core.interfaces import TRAINER_COLUMNS

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm
    from relax_core.plugins import Stack


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
    problems: list[str] = []
    who = f"algorithm: {run.algorithm.id}"
    for column in sorted(algorithm.needs - TRAINER_COLUMNS):
        makers = [id for id, component in known.items() if column in component.makes]
        preferred = [id for id in makers if id in listed] or makers
        if len(preferred) == 1:
            chosen.setdefault(preferred[0], set()).add(column)
        elif makers:
            problems.append(f"{who} needs the column {column!r}: {' and '.join(preferred)} make it; list one of them")
        else:
            made = {*TRAINER_COLUMNS, *(name for component in known.values() for name in component.makes)}
            hint = nearest(column, made) or ""
            problems.append(f"{who} needs the column {column!r}, which no stage makes{hint}: list its plugin")
    for id, (where, _) in listed.items():
        if id not in chosen:
            makes = ", ".join(sorted(known[id].makes)) or "nothing"
            problems.append(
                f"{where}: {id} makes {makes}, which {run.algorithm.id} with its settings does not need: remove it, or "
                "set what needs it"
            )
    plans = []
    for id in sorted(chosen):
        where, section = listed.get(id, (f"stages.{id}", ComponentSection(id=id)))
        plans.append(StagePlan(where, section, frozenset(chosen[id])))
    return plans, problems
