"""From a run file's data to a validated RunConfig, and back to the resolved file in which every default is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from relax_core.config import overrides as override
from relax_core.config import yaml
from relax_core.config.columns import nested_problems, planned_stages
from relax_core.config.rules import broken_rules
from relax_core.config.schema import ComponentSection, EnvironmentSection, RewardSection, RunConfig
from relax_core.config.validation import validate
from relax_core.errors import ConfigError, PluginError, RelaxError
from relax_core.hook_manager import describe, hook_problems
from relax_core.plugins import Stack, activate


@dataclass(frozen=True, slots=True)
class Slot:
    """A field of the run file that holds component sections."""

    field: str
    kind: str
    section: type[ComponentSection] = ComponentSection
    many: bool = False

    @property
    def own(self) -> tuple[str, ...]:
        """The section's own fields; the others belong to the component."""
        return tuple(self.section.model_fields)


SLOTS = (
    Slot("model", "models"),
    Slot("environments", "environments", EnvironmentSection, many=True),
    Slot("rewards", "rewards", RewardSection, many=True),
    Slot("algorithm", "algorithms"),
    Slot("modalities", "modalities", many=True),
    Slot("engine", "engines"),
    Slot("trainer", "trainers"),
    Slot("transport", "transports"),
    Slot("runtime", "runtimes"),
    Slot("stages", "stages", many=True),
    Slot("callbacks", "callbacks", many=True),
)


def load(
    path: Path, overrides: Iterable[str] = (), *, installed: Sequence[EntryPoint] | None = None
) -> tuple[RunConfig, Stack]:
    """Read a run file, override values, validate. Raises ConfigError or PluginError before anything is built."""
    return resolve(override.apply(yaml.read(path), overrides), installed=installed)


def resolve(
    raw: Mapping[str, Any], *, installed: Sequence[EntryPoint] | None = None, heavy: bool = False
) -> tuple[RunConfig, Stack]:
    """The settings of a run file's data and the stack of the plugins that it names. All problems are reported at once.

    ``heavy``: also ask components whose classes import heavy packages what only the whole run file shows to be wrong.
    """
    data = with_default_ids(raw)
    errors: list[RelaxError] = []
    run: RunConfig | None = None
    try:
        run = validate(RunConfig, data)
    except ConfigError as error:
        errors.append(error)
    stack = activate(_plugin_names(data), installed=installed)
    errors += _section_errors(data, stack)
    if run is not None:
        lines = [*version_problems(run.versions, stack), *broken_rules(run)]
        if not errors:
            lines += component_problems(run, stack, heavy=heavy)
        errors += [ConfigError(line) for line in lines]
    if len(errors) == 1:
        raise errors[0]
    if errors or run is None:
        raise ConfigError(*(line for error in errors for line in problems(error)))
    return run, stack


def problems(error: RelaxError) -> tuple[str, ...]:
    """The lines of an error: one for each thing that is wrong."""
    return error.problems if isinstance(error, ConfigError) else (str(error),)


def with_default_ids(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``engine: {device: cpu}`` means the default engine, so sections with a default may leave out its id."""
    data = dict(raw)
    for slot in SLOTS:
        default = RunConfig.model_fields[slot.field].default
        section = data.get(slot.field)
        if isinstance(default, ComponentSection) and isinstance(section, Mapping) and "id" not in section:
            data[slot.field] = {"id": default.id, **section}
    return data


def _plugin_names(data: Mapping[str, Any]) -> list[str]:
    """What can be read of ``plugins`` when it, too, may be wrong."""
    names = data.get("plugins")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _section_errors(data: Mapping[str, Any], stack: Stack) -> Iterator[RelaxError]:
    """Validate every component section by the Config that its id selects."""
    for slot in SLOTS:
        found = data.get(slot.field)
        items = enumerate(found) if slot.many and isinstance(found, list) else [("", found)]
        for index, section in items:
            if not isinstance(section, Mapping) or not isinstance(section.get("id"), str):
                continue  # reported with the run file's own fields
            where = f"{slot.field}.{index}" if slot.many else slot.field
            settings = {key: value for key, value in section.items() if key not in slot.own}
            try:
                stack.settings(slot.kind, section["id"], settings, where, slot.own)
            except RelaxError as error:
                yield error


def sections(run: RunConfig) -> Iterator[tuple[str, str, ComponentSection]]:
    """(path in the run file, kind, section) of every component that a run uses."""
    for slot in SLOTS:
        value = getattr(run, slot.field)
        if slot.many:
            yield from ((f"{slot.field}.{i}", slot.kind, section) for i, section in enumerate(value))
        elif value is not None:
            yield slot.field, slot.kind, value


def component_problems(run: RunConfig, stack: Stack, *, heavy: bool = False) -> Iterator[str]:
    """What the components find wrong with the whole run file, and callbacks with misspelt hooks."""
    for where, kind, section in sections(run):
        if not heavy and not stack.is_light(kind, section.id):
            continue
        cls = stack.load(kind, section.id, f"{where}.id")
        if kind == "callbacks":
            yield from (f"{where}: {section.id}: {problem}" for problem in hook_problems(cls))
        if kind == "algorithms":
            algorithm = stack.build(kind, section, where=where)
            yield from planned_stages(run, stack, algorithm)[1]
            trainer = stack.config("trainers", run.trainer, "trainer")
            if hasattr(trainer, "unused"):
                yield from (f"trainer.{line}" for line in trainer.unused(algorithm.outputs))
        if kind == "rewards":
            yield from nested_problems(kind, section, stack, where)
        if not hasattr(cls, "check"):
            continue
        try:
            yield from (f"{where}: {line}" for line in cls.check(stack.config(kind, section, where), run))
        except RelaxError as error:
            yield from problems(error)
        except Exception as error:
            provider = stack.provided(kind, section.id).who
            raise PluginError(f"{where}: check of {section.id!r} ({provider}) failed: {describe(error)}") from error


def version_problems(pinned: Mapping[str, str], stack: Stack) -> Iterator[str]:
    """Where the active plugins differ from those that a resolved run file names, with both versions."""
    others: dict[tuple[str, str], list[str]] = {}
    for plugin, wanted in pinned.items():
        found = stack.versions.get(plugin)
        if found is None:
            yield f"versions.{plugin}: the run was made with {wanted}, but plugin {plugin!r} is not active; list it"
        elif found != wanted:
            others.setdefault((wanted, found), []).append(plugin)
    for (wanted, found), plugins in others.items():  # one line for a distribution, however many plugins it has
        yield (
            f"versions.{plugins[0]}: the run was made with {wanted}, installed is {found}; install {wanted}, "
            f"or take {', '.join(plugins)} out of versions to go on with the other"
        )


def resolved(run: RunConfig, stack: Stack) -> dict[str, Any]:
    """Plain data with every default filled in and the plugins' versions: itself a valid run file."""
    data = run.model_dump(mode="json")
    for slot in SLOTS:
        value = getattr(run, slot.field)
        if slot.many:
            data[slot.field] = [_filled(slot, s, stack, f"{slot.field}.{i}") for i, s in enumerate(value)]
        elif value is not None:
            data[slot.field] = _filled(slot, value, stack, slot.field)
    data["versions"] = dict(stack.versions)
    return data


def _filled(slot: Slot, section: ComponentSection, stack: Stack, where: str) -> dict[str, Any]:
    own = section.model_dump(mode="json", include=set(slot.own))
    return own | stack.config(slot.kind, section, where).model_dump(mode="json")
