"""Plays of an environment with scripted replies, through the very code that plays it in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.chat import Seat
from relax_core.media import MediaStore
from relax_core.players import Player, sampling_of
from relax_core.scripted import Say, ScriptedEngine, one_by_one
from relax_core.testing.any_text import AnyText
from relax_core.testing.within import run_within

if TYPE_CHECKING:
    from relax_core.interfaces import Environment, Modality
    from relax_core.run import Run
    from relax_core.types import MediaKind, Task, Trajectory


def play(
    environment: Environment,
    task: Task,
    replies: Iterable[str],
    *,
    member: int = 0,
    seed: int = 0,
    seconds: float = 30.0,
) -> Trajectory:
    """What a play of the task becomes when the policy says these replies, one after the other.

    What goes wrong in the play is in ``trajectory.error``, as in a run. ``member`` and ``seed``: whose
    ``chat.random`` it is. Raises EngineError when more replies are asked for than there are, and AssertionError when
    the play is not over after so many seconds.
    """
    table = Table(environment)
    say = one_by_one(replies, table.adapter)
    return run_within(seconds, f"play of task {task.id!r}", lambda: table.play(task, say, member, seed))


class Table:
    """Where one instance of an environment is played, by as many as like. ``turns``: limit of a play."""

    def __init__(self, environment: Environment, turns: int | None = None) -> None:
        self.environment, self.label, self.turns = environment, type(environment).__name__, turns
        self.adapter = AnyText(MediaStore(built_in_decoders(), max_bytes=1 << 28))
        self.run = _run_of(self.label, turns)

    async def play(self, task: Task, say: Say, member: int = 0, seed: int = 0) -> Trajectory:
        engine = ScriptedEngine(say, self.adapter.stop_ids)
        # The bus is where a group's rows go: a single play has none.
        player = Player(self.run, engine, self.adapter, {self.label: self.environment})
        seat = Seat(seed, task.id, 0, member, (0,))
        sampling = sampling_of(self.run.config.sampling)
        return await player.single(replace(task, environment=self.label), seat, sampling, None, {})


def built_in_decoders() -> dict[MediaKind, Modality]:
    """One for each kind of medium."""
    from relax_core.plugins import activate
    from relax_core.run import build_modalities

    return build_modalities(activate(()))


def _run_of(label: str, turns: int | None) -> Run:
    """What a player asks of a run: settings and hooks, of which there are none."""
    from relax_core.config.schema import RunConfig
    from relax_core.hook_manager import Manager
    from relax_core.plugins import BASES, Stack
    from relax_core.run import Run

    none = {"id": "none"}
    section = {"id": label, "limits": {"turns": turns, "tokens": 1 << 24}}
    raw = {"name": "play", "steps": 1, "groups_per_step": 1, "model": none, "algorithm": none, "rewards": (none,)}
    sampling = {"max_new_tokens": 1 << 30}
    config = RunConfig.model_validate({**raw, "environments": (section,), "sampling": sampling})
    return Run(config, Path("runs/play"), Stack(Manager(), {}, {kind: {} for kind in BASES}))
