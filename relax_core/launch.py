"""From a run file to a run that may start: everything checked, its directory claimed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from relax_core.atomic import write_file
from relax_core.check import static_problems
from relax_core.check_deep import deep_problems
from relax_core.checkpoint import Checkpoints
from relax_core.config.resolve import load, resolved, version_problems
from relax_core.config.yaml import dump, read
from relax_core.errors import ConfigError
from relax_core.journal import Journal
from relax_core.metrics import MetricsLog
from relax_core.run import Run

MAY_CHANGE = frozenset({"steps", "checkpoint", "journal", "trajectories", "bus", "runs", "versions"})
"""Fields in which a resumed run may differ from what its directory was made with."""


def prepare(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = print,
    installed: Sequence[EntryPoint] | None = None,
) -> Run:
    """Read, check (statically, then deeply) and claim the run's directory. Raises RelaxError; then nothing was started.

    ``installed``: the entry points to choose plugins from; default: those of the installed distributions.
    """
    config, stack = load(path, overrides, installed=installed)
    run = Run(config, config.runs / config.name, stack)
    problems = [*static_problems(run, report)] or [*deep_problems(run, report)]
    if problems:
        raise ConfigError(*problems)
    claim(run)
    for i, section in enumerate(config.callbacks):
        stack.add_callback(stack.build("callbacks", section, where=f"callbacks.{i}"), f"callbacks.{i}")
    return run


def claim(run: Run) -> None:
    """Write ``config.yaml`` into the run's directory. A run that is there already must have the same settings.

    One that got nowhere, for a wrong setting perhaps, leaves a directory that any settings may take.
    """
    config, wanted = run.config, resolved(run.config, run.stack)
    file = run.directory / "config.yaml"
    taken = max(Checkpoints(run.directory / "checkpoints", config.checkpoint.keep, readonly=True).steps(), default=None)
    if file.exists() and (taken is not None or _has_results(run)):
        made = read(file)
        if problems := [*version_problems(made.get("versions", {}), run.stack)]:
            raise ConfigError(*(f"{file}: {line}" for line in problems))
        changed = [line for line in differences(made, wanted) if re.split("[.:]", line)[0] not in MAY_CHANGE]
        if changed:
            raise ConfigError(
                f"{run.directory}: holds a run with other settings ({'; '.join(changed[:3])}"
                f"{' ...' if len(changed) > 3 else ''}): choose another name=..., or remove the directory"
            )
    if taken is not None and taken > config.steps:
        raise ConfigError(f"steps: found {config.steps}, but {run.directory} has taken {taken}: ask for more")
    try:
        run.directory.mkdir(parents=True, exist_ok=True)
        write_file(file, dump(wanted).encode())
    except OSError as error:
        raise ConfigError(f"runs: {run.directory} cannot be written ({error.strerror}): choose another") from error


def _has_results(run: Run) -> bool:
    """Whether the directory has a trained step, or a line of metrics."""
    journal = Journal(run.directory / "journal", run.config.journal.keep_steps)
    return bool(journal.steps() or MetricsLog(run.directory).read())


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """``path: old -> new`` for each value in which two resolved run files differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, f"{where}.{i}")
    elif old != new:
        yield f"{where}: {old!r} -> {new!r}"
