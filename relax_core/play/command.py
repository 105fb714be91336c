"""The command ``relax play``: what is asked for is found, played, scored, shown and saved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from relax_core.chat import Seat
from relax_core.errors import ConfigError, nearest
from relax_core.play import voices
from relax_core.play.heard import HeardEnvironment
from relax_core.play.table import Table, laid, laid_for_model
from relax_core.players import Player, sampling_of
from relax_core.types import Group, Stop, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.run import Run

Policy = Literal["scripted", "human", "model"]
Split = Literal["train", "eval"]

FAILED, INTERRUPTED = 3, 130
"""Exit codes: a play failed, which is data of its trajectory; Ctrl-C."""
LISTED = 1000
"""Tasks whose ids are looked at for a near one."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be played, as it was asked for. ``task``: its place, or its id."""

    policy: str | None = None
    replies: Sequence[str] = ()
    script: Path | None = None
    task: str = "0"
    environment: str | None = None
    split: str = "train"
    plays: int = 1
    folder: Path | None = None


def main(path: Path, overrides: Sequence[str], wish: Wish) -> int:
    """Play, and save what was played. Returns 0, 3 when a play failed, 130 when it was interrupted."""
    from relax_core.config.resolve import load
    from relax_core.run import Run

    policy, split = chosen_policy(wish), chosen_split(wish.split)
    config, stack = load(path, overrides)
    run = Run(config, config.runs / config.name, stack)
    return asyncio.run(_main(run, wish, policy, split))


async def _main(run: Run, wish: Wish, policy: Policy, split: Split) -> int:
    label = chosen_environment(run, wish.environment)
    if policy == "model":
        laying = laid_for_model(run, label, wish.folder)
    else:
        laying = laid(run, label, wish.folder, script_of(wish) if policy == "scripted" else None)
    async with laying as table:
        task = replace(chosen_task(table.environment.tasks(split), wish.task), environment=label)
        return await play_all(table, task, split, wish.plays)


# --- what is played ---------------------------------------------------------------------------------------------------


def chosen_policy(wish: Wish) -> Policy:
    """Who replies: a script where there is one, else a person. Raises ConfigError for options that do not fit."""
    given = bool(wish.replies) or wish.script is not None
    policy = wish.policy or ("scripted" if given else "human")
    if policy not in get_args(Policy):
        known = get_args(Policy)
        raise ConfigError(f"--policy: found {policy!r}{nearest(policy, known)}; allowed are {', '.join(known)}")
    if given and policy != "scripted":
        raise ConfigError(f"--reply, --replies: found with --policy {policy}, which has its own: leave them out")
    if policy == "scripted" and not given:
        raise ConfigError("--policy scripted: there are no replies: give --reply TEXT, or --replies FILE")
    return cast(Policy, policy)


def chosen_split(split: str) -> Split:
    if split not in get_args(Split):
        raise ConfigError(f"--split: found {split!r}; allowed are {', '.join(get_args(Split))}")
    return cast(Split, split)


def script_of(wish: Wish) -> list[str]:
    """Those of the file, then those of the command line."""
    return [*(voices.read_script(wish.script) if wish.script else ()), *wish.replies]


def chosen_environment(run: Run, name: str | None) -> str:
    """The label of an environment of the run file: the first one, unless it is named."""
    labels = [section.label for section in run.config.environments]
    if name is not None and name not in labels:
        raise ConfigError(f"--environment: found {name!r}{nearest(name, labels)}; the run file has {', '.join(labels)}")
    return name or labels[0]


def chosen_task(tasks: Sequence[Task], wanted: str) -> Task:
    """By its place, or by its id. Raises ConfigError when there is none, DataError for a bad row."""
    if wanted.isdecimal():
        if int(wanted) < len(tasks):
            return tasks[int(wanted)]
        raise ConfigError(f"--task: found {wanted}; the split has {len(tasks)} tasks, counted from 0")
    seen: list[str] = []
    for task in tasks:
        if task.id == wanted:
            return task
        if len(seen) < LISTED:
            seen.append(task.id)
    hint = nearest(wanted, seen) or f"; the first ones are {', '.join(seen[:5]) or 'none'}"
    raise ConfigError(f"--task: no task has the id {wanted!r}{hint} (a number is a task's place)")


# --- playing ----------------------------------------------------------------------------------------------------------


async def play_all(table: Table, task: Task, split: Split, plays: int) -> int:
    """The plays of a task, one after the other; all that was played is saved, whatever ends it."""
    group, interrupted = Group(task.id, 0, task, 0), False
    try:
        for member in range(plays):
            trajectory, interrupted = await play_one(table, task, member, split)
            group.trajectories.append(trajectory)
            if interrupted:
                break
        else:
            await table.graders.score(group)
    finally:
        if group.trajectories:
            table.files.write(table.version, [group])
    for trajectory in group.trajectories:
        table.show.ended(trajectory)
    table.show.note(f"saved: {table.files.path(table.version)}")
    if interrupted:
        return INTERRUPTED
    return FAILED if any(trajectory.error for trajectory in group.trajectories) else 0


async def play_one(table: Table, task: Task, member: int, split: Split) -> tuple[Trajectory, bool]:
    """What was played, and whether it was interrupted (Ctrl-C): then as far as it went."""
    heard, engine = HeardEnvironment(table.environment, table.show), table.engine()
    # The bus is where a group's rows go: a single play has none.
    player = Player(table.run, engine, table.adapter, {table.label: heard})
    seat = Seat(table.run.config.seed, task.id, 0, member, (member,), split)
    table.show.begins(task, member)
    engine.enter(split)
    try:
        return await player.single(task, seat, sampling_of(table.run.config.sampling), None, {}), False
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or current.uncancel():
            raise
        chat = heard.chat
        turns, samples = (chat.turns, chat.samples) if chat else ([], [])
        return Trajectory(task, 0, member, turns, samples, Stop.ABORT), True
    finally:
        engine.leave(split)
