"""What a play by hand needs: the run's adapter, rewards and files, and an engine that says what is wanted."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from relax_core.errors import ConfigError
from relax_core.play import voices
from relax_core.play.show import Show
from relax_core.trajectories import TrajectoryFiles

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, Environment, ModelAdapter
    from relax_core.media import MediaStore
    from relax_core.run import Run
    from relax_core.scoring import Graders, Scorer
    from relax_core.scripted import Say


@dataclass(frozen=True, slots=True)
class Table:
    """``engine``: makes the one of a play. ``version``: of the policy's weights."""

    run: Run
    engine: Callable[[], Engine]
    adapter: ModelAdapter
    environment: Environment
    label: str
    graders: Graders
    files: TrajectoryFiles
    show: Show
    version: int = 0


@asynccontextmanager
async def laid(run: Run, label: str, folder: Path | None, replies: Sequence[str] | None) -> AsyncIterator[Table]:
    """For replies that are given, or None: typed. No model is loaded, only its tokenizer."""
    from relax_core.run import build_adapter, build_environments

    adapter, media = build_adapter(run)
    files, show = _files(run, folder, media)
    speak: Callable[[], Say]
    if replies is None:
        speak = functools.partial(_same, voices.person(adapter, show.prompt))
    else:
        speak = functools.partial(voices.script, replies, adapter, show.note)
        speak()  # what cannot be said is refused before anything is played
    environments, graders = build_environments(run), _graders(run, show)
    try:
        await graders.begin(run, policy=None)  # the policy is who types, or nobody
        engine = functools.partial(_speaking, speak, adapter)
        yield Table(run, engine, adapter, environments[label], label, graders, files, show)
    finally:
        await graders.close()
        for environment in environments.values():
            await environment.close()


def _graders(run: Run, show: Show) -> Scorer:
    """Without those rewards that ask the policy, which is not there."""
    from relax_core.scoring import Scorer

    every = Scorer.of(run, show.note)
    asking = [section.label for section, reward in every.rewards if reward.asks_policy(reward.config)]
    for name in asking:
        show.note(f"reward {name}: asks the policy, which is not there: it is left out (--policy model has it)")
    every.rewards = [(section, reward) for section, reward in every.rewards if section.label not in asking]
    return every


def _same(say: Say) -> Say:
    return say


def _speaking(speak: Callable[[], Say], adapter: ModelAdapter) -> Engine:
    from relax_core.scripted import ScriptedEngine

    return ScriptedEngine(speak(), adapter.stop_ids)


@asynccontextmanager
async def laid_for_model(run: Run, label: str, folder: Path | None) -> AsyncIterator[Table]:
    """The policy of the newest checkpoint, in the run's own engine; the run's files stay as they are."""
    from relax_core.screen import Screen
    from relax_core.system import assembled

    async with assembled(run, Screen(run, quiet=True), readonly=True) as system:
        roles, version = system.roles, system.first_step
        files, show = _files(run, folder, roles.media)
        there = f"the policy of step {version}" if version else "no checkpoint is there: the policy is the initial one"
        show.note(f"{run.directory}: {there}")
        await system.publish(version)
        environment = roles.environments[label]
        yield Table(run, lambda: roles.engine, roles.adapter, environment, label, roles.graders, files, show, version)


def _files(run: Run, folder: Path | None, media: MediaStore) -> tuple[TrajectoryFiles, Show]:
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--folder: {folder} is there already, and not empty: choose another")
    files = TrajectoryFiles(folder or free_folder(run), media.modalities, decode=media.decode)
    return files, Show(Console(), files, media.decode)


def free_folder(run: Run) -> Path:
    """``<runs>/<name>-plays/1``, or the first number behind those that are taken."""
    home = run.config.runs / f"{run.config.name}-plays"
    taken = {int(p.name) for p in home.iterdir() if p.name.isdecimal()} if home.is_dir() else set()
    return home / str(max(taken, default=0) + 1)
