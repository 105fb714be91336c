"""``relax replay``: a past step computed again from the journal, from rewards to gradient norm, and compared exactly.

The trainer starts from the newest checkpoint at or before the step (or from the initial weights), trains the steps in
between as they were recorded, and then the step itself on what is computed anew: rewards from the trajectories,
advantages from the rewards, loss and gradient from these, in the recorded micro-batches. Nothing is sampled.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.actor_critic import build_trainer
from relax_core.checkpoint import Checkpoints
from relax_core.config import yaml
from relax_core.errors import CheckpointError
from relax_core.hookspecs import GroupEvent
from relax_core.interfaces import Cut, Reward, Row, Streaming
from relax_core.journal import Journal, JournalEntry
from relax_core.metrics import TIME
from relax_core.old_policy import TrainerItself, prepared, with_old_policy
from relax_core.run import Run, build_adapter, build_algorithm, rebuild
from relax_core.runtime_config import deployed_of
from relax_core.scoring import Scorer
from relax_core.stages import scored_groups
from relax_core.trajectories import TrajectoryFiles
from relax_core.types import Version

if TYPE_CHECKING:
    from rich.table import Table

    from relax_core.interfaces import Algorithm, StepResult
    from relax_core.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Comparison:
    """A quantity as recorded and as computed again, in words; ``equal`` means to the last bit."""

    name: str
    recorded: str
    recomputed: str
    equal: bool


def main(directory: Path, step: int) -> int:
    """Print the comparison. Returns 0 when everything is equal, else 1. Raises RelaxError when that cannot be done."""
    from rich.console import Console

    console = Console()

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status(f"computing step {step} again"), tempfile.TemporaryDirectory(prefix="relax-replay-") as scratch:
        found = asyncio.run(replay(directory, step, Path(scratch), note))
    console.print(comparison_table(found, step))
    different = [c.name for c in found if not c.equal]
    note(f"different: {', '.join(different)}" if different else "everything is equal to the last bit")
    return 1 if different else 0


async def replay(directory: Path, step: int, scratch: Path, note: Callable[[str], None]) -> list[Comparison]:
    """What was recorded of a step beside what comes out now. Hooks see ``scratch`` as the run's directory."""
    found = rebuild(yaml.read(directory / "config.yaml"))
    run = Run(found.config, scratch, found.stack)
    for i, section in enumerate(run.config.callbacks):
        run.stack.add_callback(run.stack.build("callbacks", section, where=f"callbacks.{i}"), f"callbacks.{i}")
    run.stack.hook.setup(run=run)
    try:
        return await Replay(run, directory, note).compare(step)
    finally:
        run.stack.hook.teardown(run=run)


class Replay:
    """The parts of a run that are needed to train its past steps again."""

    def __init__(self, run: Run, directory: Path, note: Callable[[str], None]) -> None:
        self.run, self.directory, self.note = run, directory, note
        config = run.config
        self.adapter, self.media = build_adapter(run)
        self.algorithm: Algorithm = build_algorithm(run)
        self.trainer = build_trainer(run, self.adapter, self.algorithm.outputs)
        self.scorer = Scorer.of(run)
        self.kept = _keep_asked(self.scorer)
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep, readonly=True)
        self.journal = Journal(directory / "journal", config.journal.keep_steps)
        self.files = TrajectoryFiles(directory / "trajectories", self.media.modalities)

    async def compare(self, step: int) -> list[Comparison]:
        """Train up to the step, then compute it anew and compare.

        Raises CheckpointError when a checkpoint or a journal entry that is needed is missing or was altered.
        """
        first = self._restore(step)
        for s in range(first, step):
            await self._train_recorded(s)
        entry = self.journal.read(step, self.files.media)
        with self._media_of(entry):
            try:
                await self.scorer.begin(self.run, None)
                rows = await self._scored(entry)
            finally:
                await self.scorer.close()
            rows = await self._credited(entry, rows)
            result = await self._train(entry, rows)
        return [
            *compare_rewards(entry, rows),
            *compare_columns(entry.rows, rows, (*COMPUTED, *sorted(self.algorithm.makes))),
            *compare_training(entry, result),
        ]

    def _restore(self, step: int) -> int:
        """Load the checkpoint from which the step is reached; returns how many steps are behind it."""
        found = self.checkpoints.before(step, self.note)
        first = found[0] if found else 0
        present = set(self.journal.steps())
        if step not in present:
            raise CheckpointError(f"{self.journal.folder}: no entry of step {step}; {self.journal.span()}")
        missing = [s for s in range(first, step + 1) if s not in present]
        if missing:
            raise CheckpointError(
                f"{self.journal.folder}: no entry of step {missing[0]}; to compute step {step} the entries of steps "
                f"{first} to {step} are needed, since the newest checkpoint before it is "
                f"{found[1].name if found else 'none'} (see journal.keep_steps and checkpoint.keep)"
            )
        if found:
            folder = found[1]
            self.trainer.load(folder / "trainer")
            states = json.loads((folder / "state.json").read_text())["callbacks"]
            for name, callback in self.run.stack.callbacks.items():
                callback.load_state_dict(states.get(name, {}))
        self.note(f"starting from {found[1] if found else 'the initial weights'}, trained again from step {first} on")
        return first

    async def _train_recorded(self, step: int) -> None:
        """Train a step before the one asked for, as recorded, and say so when something else comes out."""
        entry = self.journal.read(step, self.files.media)
        with self._media_of(entry):
            result = await self._train(entry, entry.rows)
        if different := [c.name for c in compare_training(entry, result) if not c.equal]:
            self.note(f"step {step}, on the way, already comes out differently: {', '.join(different)}")

    async def _train(self, entry: JournalEntry, rows: Sequence[Row]) -> StepResult:
        return await self.trainer.step(entry.step, recorded_plan(entry, rows), self.algorithm)

    async def _scored(self, entry: JournalEntry) -> list[Row]:
        """The entry's rows with trajectories that were scored and shaped anew."""
        groups: dict[str, Group] = {}
        for group in entry.groups:
            blank = [replace(t, rewards=self._kept_of(t), reward=None, raw_reward=None) for t in group.trajectories]
            groups[group.id] = again = replace(group, trajectories=blank)
            await self.scorer.score(again)
            rewards = [t.reward for t in again.trajectories]
            shaped = self.run.stack.pipe("shape_rewards", self.run, rewards, GroupEvent(again))
            for trajectory, reward in zip(again.trajectories, shaped, strict=True):
                trajectory.reward = reward
        for name, reason in self.scorer.last_failure.items():
            self.note(f"reward {name} abstained at least once: {reason}")
        rows = []
        for row in entry.rows:
            group = groups[row.group]
            trajectory = next(t for t in group.trajectories if t.member == row.columns["trajectory"].member)
            new = {"group": group, "trajectory": trajectory, "reward": trajectory.reward}
            rows.append(row.having(new))
        return rows

    def _kept_of(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {name: value for name, value in trajectory.rewards.items() if name in self.kept}

    async def _credited(self, entry: JournalEntry, rows: Sequence[Row]) -> list[Row]:
        """The rows with advantages of the new rewards, and log-probs of the policy as it is before the step."""
        scored = scored_groups(list(rows))
        together = [scored] if self.algorithm.streaming is Streaming.BATCH else [[group] for group in scored]
        credit = {id: columns for groups in together for id, columns in self.algorithm.advantages(groups).items()}
        credited = [row.having(credit[row.id]) for row in rows]
        if self.run.config.old == "engine" or not any("old_logprobs" in row.columns for row in rows):
            return credited
        old, version = TrainerItself(self.trainer), Version(0, entry.step)
        apart = deployed_of(self.run).old_policy_gpus is not None  # then it was asked group by group
        parts = [list(rows) for _, rows in groupby(credited, lambda row: row.group if apart else "")]
        found = [row for part in parts for row in await with_old_policy(old, part, version)]
        return prepared(self.algorithm, found)

    def _media_of(self, entry: JournalEntry) -> _Held:
        return _Held(self, entry)


def _keep_asked(scorer: Scorer) -> list[str]:
    """The names of rewards that asked the policy's engine, which is no more: what they gave is taken as recorded."""
    asked = [type(reward).asks_policy(reward.config) for _, reward in scorer.rewards]
    scorer.rewards = [
        (section, _Recorded(section.label) if kept else reward)
        for (section, reward), kept in zip(scorer.rewards, asked, strict=True)
    ]
    return [section.label for (section, _), kept in zip(scorer.rewards, asked, strict=True) if kept]


class _Recorded(Reward):
    """Gives what the reward of that name gave when the play was scored."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        return trajectory.rewards.get(self.config)


class _Held:
    """Holds the model features of an entry's media while it is trained: its prompts are encoded again."""

    def __init__(self, replay: Replay, entry: JournalEntry) -> None:
        self.adapter, self.media = replay.adapter, replay.media
        self.rows = [row for row in entry.rows if row.columns.get("media")]
        self.keys: list[str] = []

    def __enter__(self) -> None:
        for row in self.rows:
            keys = [ref.key for ref in row.columns["media"]]
            if not all(key in self.media for key in keys):
                turns = row.columns["trajectory"].turns
                self.adapter.encode([m for turn in turns for m in (*turn.prompt, turn.reply)][:-1])
            self.media.retain(keys)
            self.keys += keys

    def __exit__(self, *error: object) -> None:
        self.media.release(self.keys)


async def recorded_plan(entry: JournalEntry, rows: Sequence[Row]) -> AsyncIterator[Cut]:
    """The entry's micro-batches, made of ``rows``."""
    by_id = {row.id: row for row in rows}
    for cut in entry.cuts:
        yield Cut([by_id[id] for id in cut.rows], cut.last)


# --- comparing --------------------------------------------------------------------------------------------------------


def compare_rewards(entry: JournalEntry, rows: Sequence[Row]) -> Iterator[Comparison]:
    """Every reward of every trajectory that has a row, by name, and their sums before and after shaping."""
    ours = [row.columns["trajectory"] for row in entry.rows]
    again = [row.columns["trajectory"] for row in rows]
    for name in dict.fromkeys(name for t in (*ours, *again) for name in t.rewards):
        yield compare_values(
            f"reward {name}", [t.rewards.get(name) for t in ours], [t.rewards.get(name) for t in again]
        )
    yield compare_values("reward, total", [t.raw_reward for t in ours], [t.raw_reward for t in again])
    yield compare_values("reward, shaped", [t.reward for t in ours], [t.reward for t in again])


COMPUTED = ("advantages", "weight", "units", "old_logprobs")
"""Columns that a replay computes again, whatever the algorithm; it may make more."""


def compare_columns(
    recorded: Sequence[Row], recomputed: Sequence[Row], names: Sequence[str] = COMPUTED
) -> Iterator[Comparison]:
    """The columns of these names that the rows have, each as one list of numbers."""
    for name in names:
        if any(name in row.columns for row in recorded):
            yield compare_values(name, _flat(recorded, name), _flat(recomputed, name))


def compare_training(entry: JournalEntry, result: StepResult) -> Iterator[Comparison]:
    """What the trainer gave: updates, micro-batches, loss, gradient norm and its other metrics."""
    cuts = [(tuple(rows), last) for rows, last in result.cuts]
    ours = [(cut.rows, cut.last) for cut in entry.cuts]
    yield Comparison("micro-batches", str(len(ours)), str(len(cuts)), ours == cuts)
    yield compare_values("updates", [entry.updates], [result.updates])
    yield compare_values("updates skipped", [entry.skipped], [result.skipped])
    for name in dict.fromkeys([*entry.metrics, *result.metrics]):
        if not name.startswith(TIME):
            yield compare_values(name, [entry.metrics.get(name)], [result.metrics.get(name)])


def compare_values(name: str, recorded: Sequence[Any], recomputed: Sequence[Any]) -> Comparison:
    """Equal means the same numbers (NaN equals NaN) in the same order, and None in the same places."""
    pairs = list(zip(recorded, recomputed, strict=False))
    different = [(a, b) for a, b in pairs if not _same(a, b)]
    text = _words(recomputed)
    if different or len(recorded) != len(recomputed):
        distances = [abs(a - b) for a, b in different if a is not None and b is not None]
        text += f" ({len(different)} differ" + (f", by at most {max(distances):.3g})" if distances else ")")
    return Comparison(name, _words(recorded), text, not different and len(recorded) == len(recomputed))


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool((a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b)))


def _flat(rows: Sequence[Row], name: str) -> list[Any]:
    values: list[Any] = []
    for row in rows:
        value: Any = row.columns.get(name)
        values += value.reshape(-1).tolist() if hasattr(value, "reshape") else [value]
    return values


def _words(values: Sequence[Any]) -> str:
    """One value in full, or how many there are and their mean."""
    known = [v for v in values if v is not None]
    if len(values) == 1:
        return "-" if not known else f"{known[0]:,d}" if isinstance(known[0], int) else repr(float(known[0]))
    mean = f"mean {math.fsum(known) / len(known):.6g}" if known else "none known"
    return f"{len(values):,}, {mean}"


def comparison_table(found: Sequence[Comparison], step: int) -> Table:
    """The comparisons, one a line."""
    from rich.table import Table

    table = Table(title=f"step {step} (step {step + 1} of the metrics), computed again from the journal")
    for heading in ("quantity", "recorded", "recomputed", "equal"):
        table.add_column(heading)
    for c in found:
        table.add_row(c.name, c.recorded, c.recomputed, "yes" if c.equal else "[bold red]NO[/]")
    return table
