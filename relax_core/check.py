"""The static check of a run: plugins, settings, rules and data rows, and the plan; no model, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.check_data import Split, SplitReport, look
from relax_core.config.columns import planned_stages
from relax_core.errors import ConfigError, PluginError, RelaxError
from relax_core.hook_manager import describe
from relax_core.plugins import BUILT_IN

if TYPE_CHECKING:
    from relax_core.config.schema import EnvironmentSection, RunConfig
    from relax_core.interfaces import ComponentConfig, Environment
    from relax_core.plugins import Stack
    from relax_core.run import Run

EXCLUSIVE = (("decord", "decord2", "they install the same module: uninstall decord, decord2 is the maintained one"),)
"""Distributions that must not be installed together, and why."""


@dataclass(slots=True)
class Findings:
    """What a check found. ``plan``: (what, how) in reading order; ``notes`` are worth knowing and no errors."""

    problems: list[str] = field(default_factory=list)
    plan: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(path: Path, overrides: Sequence[str], *, deep: bool = False) -> int:
    """``relax check``: print the plan. Raises RelaxError with every problem."""
    from relax_core.config.resolve import load
    from relax_core.run import Run

    config, stack = load(path, overrides)
    run = Run(config, config.runs / config.name, stack)
    problems = static_problems(run, print)
    if deep and not problems:
        from relax_core.check_deep import deep_problems
        from relax_core.probe_deep import engine_problems

        # A run is spared the probe here: it probes its own engines, once they are started.
        problems = deep_problems(run, print) or engine_problems(run, print)
    if problems:
        raise ConfigError(*problems)
    print(
        f"ok: {path} can run"
        if deep
        else f"ok: {path} (check --deep also looks at the model, its template, media and engine)"
    )
    return 0


def static_problems(run: Run, report: Callable[[str], None]) -> list[str]:
    """One line for each problem of a resolved run; when there is none, its plan is reported line by line."""
    found = static_check(run.config, run.stack)
    if not found.problems:
        width = max(len(what) for what, _ in found.plan)
        for what, how in found.plan:
            report(f"{what:<{width}}  {how}")
    for note in found.notes:
        report(f"note: {note}")
    return found.problems


def static_check(run: RunConfig, stack: Stack) -> Findings:
    """Check a resolved run and describe what it will do."""
    found = Findings()
    found.problems += package_problems()
    _describe_roles(run, stack, found)
    _describe_steps(run, found)
    _describe_deployment(run, stack, found)
    _check_rewards(run, stack, found)
    _check_environments(run, stack, found)
    _describe_evaluations(run, found)
    every, keep = run.checkpoint.every, run.checkpoint.keep
    found.plan.append(("checkpoints", f"every {_count(every, 'step')} and at the end, the newest {keep} are kept"))
    return found


def package_problems() -> Iterator[str]:
    """Installed distributions that break each other."""
    for one, other, why in EXCLUSIVE:
        installed = [f"{name} {found}" for name in (one, other) if (found := _version(name))]
        if len(installed) == 2:
            yield f"environment: {' and '.join(installed)} are both installed; {why}"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# --- the plan -------------------------------------------------------------------------------------------------------


def _describe_roles(run: RunConfig, stack: Stack, found: Findings) -> None:
    found.plan.append(("run", f"{run.name}, written to {run.runs / run.name}, seed {run.seed}"))
    named = [f"{name} ({dist})" for name, dist in stack.versions.items() if name not in BUILT_IN]
    found.plan.append(("plugins", ", ".join([f"built-in ({stack.versions[BUILT_IN[0]]})", *named])))
    runtime = stack.config("runtimes", run.runtime, "runtime")
    overlap = getattr(runtime, "overlap", None)
    transport = f", transport {run.transport.id}" if run.transport else ""
    found.plan.append(("runtime", f"{run.runtime.id}{f', overlap {overlap}' if overlap else ''}{transport}"))
    for what, section in (("model", run.model), ("engine", run.engine), ("trainer", run.trainer)):
        found.plan.append((what, _section(section.id, section.settings)))
    found.plan.append(("algorithm", _section(run.algorithm.id, run.algorithm.settings)))
    _describe_stages(run, stack, found)
    if run.callbacks:
        found.plan.append(("callbacks", ", ".join(section.id for section in run.callbacks)))


def _describe_stages(run: RunConfig, stack: Stack, found: Findings) -> None:
    """The stages between sampling and training, where the algorithm tells what it needs without heavy packages.

    And what it and they have to note.
    """
    if not stack.is_light("algorithms", run.algorithm.id):
        return
    algorithm = stack.build("algorithms", run.algorithm, where="algorithm")
    try:
        config = stack.config("algorithms", run.algorithm, "algorithm")
        found.notes += (f"algorithm: {line}" for line in algorithm.notes(config, run))
    except Exception as error:
        provider = stack.provided("algorithms", run.algorithm.id).who
        raise PluginError(f"algorithm: notes of {run.algorithm.id!r} ({provider}) failed: {describe(error)}") from error
    for plan in planned_stages(run, stack, algorithm)[0]:
        own = stack.config("stages", plan.section, plan.where)
        made = ", ".join(sorted(plan.columns))
        how = f"makes {made}{_model_of(own)}{_settings(plan.section.settings)}"
        found.plan.append((f"stage {plan.section.id}", how))
        if hasattr(own, "notes"):
            found.notes += (f"{plan.where}.{line}" for line in own.notes(run))


def _describe_deployment(run: RunConfig, stack: Stack, found: Findings) -> None:
    """Which role is where, and what overlaps, as far as the runtime's settings can tell (see ``LocalConfig``)."""
    runtime: Any = stack.config("runtimes", run.runtime, "runtime")
    try:
        if hasattr(runtime, "problems"):
            found.problems += (f"runtime.{line}" for line in runtime.problems(run, stack))
        if hasattr(runtime, "notes"):
            found.notes += (f"runtime.{line}" for line in runtime.notes(run, stack))
        if hasattr(runtime, "deployment") and not found.problems:
            found.plan += runtime.deployment(run, stack)
    except RelaxError:
        raise
    except Exception as error:
        provider = stack.provided("runtimes", run.runtime.id).who
        raise PluginError(f"runtime: check of {run.runtime.id!r} ({provider}) failed: {describe(error)}") from error


def _model_of(config: ComponentConfig) -> str:
    """Which model a stage runs, if it runs one of its own or could."""
    if not hasattr(config, "model"):
        return ""
    return " with the run's own model and its initial weights" if config.model is None else " with a model of its own"


def _section(id: str, settings: dict[str, Any]) -> str:
    """A component with its settings."""
    return f"{id}{_settings(settings)}"


def _settings(settings: dict[str, Any]) -> str:
    """In parentheses, those too long for a line shortened."""
    shown = ", ".join(f"{key}: {_short(json.dumps(value, default=str))}" for key, value in settings.items())
    return f" ({shown})" if shown else ""


def _short(text: str, limit: int = 60) -> str:
    text = text.replace('"', "")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _describe_steps(run: RunConfig, found: Findings) -> None:
    rows = run.groups_per_step * run.group_size
    mini_batches = run.updates_per_step // run.epochs
    cut = f", in {_count(mini_batches, 'mini-batch', 'es')}" if mini_batches > 1 else ""
    passes = f" x {run.epochs} epochs" if run.epochs > 1 else ""
    found.plan += [
        ("steps", f"{run.steps}, each of {_count(run.groups_per_step, 'group')} x {run.group_size} = {rows} plays"),
        ("updates", f"{run.updates_per_step} a step{cut}{passes}"),
        ("staleness", _staleness(run)),
        (
            "sampling",
            f"temperature {run.sampling.temperature:g}, up to {run.sampling.max_new_tokens} new tokens a reply",
        ),
    ]


def _staleness(run: RunConfig) -> str:
    if run.max_staleness == 0:
        return "0: synchronous and on-policy"
    versions = _count(run.max_staleness, "policy version")
    return f"up to {versions} behind, order {run.order}, interrupt {run.interrupt}"


def _describe_evaluations(run: RunConfig, found: Findings) -> None:
    for section in run.evaluation:
        when = [f"every {_count(section.every, 'step')}"] if section.every else []
        when = [*(["at the start"] if section.at_start else []), *when, "at the end"]
        size = section.size or "all"
        temperature = section.sampling.temperature if section.sampling else 0.0
        how = f"temperature {temperature:g}" if temperature else "greedy"
        plays = f", {section.n} plays each" if section.n > 1 else ""
        text = f"{size} tasks of {section.environment}{plays}, {how}, {' and '.join(when)}"
        found.plan.append((f"evaluation {section.name}", text))


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else ending}"


# --- rewards and data -----------------------------------------------------------------------------------------------


def _check_rewards(run: RunConfig, stack: Stack, found: Findings) -> None:
    """Building a reward shows a missing package or file."""
    for i, section in enumerate(run.rewards):
        if stack.is_light("rewards", section.id):
            try:
                stack.build("rewards", section, where=f"rewards.{i}")
            except RelaxError as error:
                found.problems.append(str(error))
    shown = ", ".join(f"{section.label} x {section.weight:g}" for section in run.rewards)
    found.plan.append(("rewards", shown))


def _check_environments(run: RunConfig, stack: Stack, found: Findings) -> None:
    total = sum(section.weight for section in run.environments)
    for i, section in enumerate(run.environments):
        if not stack.is_light("environments", section.id):
            found.notes.append(f"environments.{i}: {section.id} needs heavy packages; its rows are checked by --deep")
            continue
        try:
            environment: Environment = stack.build("environments", section, where=f"environments.{i}")
        except RelaxError as error:
            found.problems.append(str(error))
            continue
        train = _check_split(run, environment, section, "train", found)
        share = section.weight / total
        if train.size:
            passes = run.steps * run.groups_per_step * share / train.size
            text = f"{_count(train.size, 'task')}, {share:.0%} of the groups, {passes:,.2f} passes over them"
            found.plan.append((f"environment {section.label}", text))
        for i, line in enumerate(train.example):
            found.plan.append(("" if i else f"a task of {section.label}", line))
        sections = [e for e in run.evaluation if e.environment == section.label]
        if not sections:
            continue
        held_out = _check_split(run, environment, section, "eval", found).size
        for evaluation in sections:
            if held_out and evaluation.size and evaluation.size > held_out:
                found.problems.append(
                    f"evaluation.{evaluation.name}.size: found {evaluation.size}, the eval split of "
                    f"{section.label} has {held_out}: lower it, or leave it out for all"
                )


def _check_split(
    run: RunConfig, environment: Environment, section: EnvironmentSection, split: Split, found: Findings
) -> SplitReport:
    where = f"environments.{section.label}"
    report = look(environment, section, split, run)
    found.problems += report.problems
    found.notes += report.notes(where)
    return report
