"""Evaluation: named sets, each played on one pinned policy version, in slots and under keys of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.bad_rows import BadRows
from relax_core.chat import Seat
from relax_core.content_hash import content_hash
from relax_core.errors import ConfigError, DataError
from relax_core.play_counts import noted_means
from relax_core.players import Memo, sampling_of
from relax_core.prompts import TooLong
from relax_core.tasks import located
from relax_core.types import Group, Sampling, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.config.schema import EvaluationSection, RunConfig
    from relax_core.prompts import Prompts
    from relax_core.run import Run
    from relax_core.runtime import Roles
    from relax_core.screen import Screen

Results = dict[str, dict[str, float]]

AT_ONCE = 1024
"""Plays of an evaluation that run at the same time, at most."""


class Evaluator:
    """Plays the evaluation sets of a run file. Training is the same with and without it."""

    def __init__(
        self,
        run: Run,
        roles: Roles,
        prompts: Prompts,
        note: Callable[[str], None] = print,
    ) -> None:
        self.run, self.engine, self.players, self.graders = run, roles.engine, roles.players, roles.graders
        environments = roles.environments
        splits = {s.environment: environments[s.environment].tasks("eval") for s in run.config.evaluation}
        sizes = {f"{name}/eval": len(tasks) for name, tasks in splits.items()}
        self.bad = BadRows(run.config.data.max_bad_fraction, sizes, note)
        with ThreadPoolExecutor(run.config.data.workers, thread_name_prefix="evaluation") as pool:
            readable = Readable(prompts, pool, self.bad)
            self.sets = {s.name: readable.tasks(s, splits[s.environment]) for s in run.config.evaluation}

    def held_out(self) -> dict[str, set[str]]:
        """Content hashes that must never occur in training, by evaluation."""
        return {
            section.name: {content_hash(task) for task in self.sets[section.name]}
            for section in self.run.config.evaluation
            if section.disjoint
        }

    def due(self, version: int) -> list[EvaluationSection]:
        """The sets to be played on a version: their interval has come round, or the run ends with it."""
        return [
            section
            for section in self.run.config.evaluation
            if (section.at_start if version == 0 else section.every and version % section.every == 0)
            or version == self.run.config.steps
        ]

    async def evaluate(self, sections: Sequence[EvaluationSection]) -> Results:
        """Results by set name. Whoever calls it keeps the published version as it is until it returns."""
        places = asyncio.Semaphore(AT_ONCE)
        found = await asyncio.gather(*(self._play_set(section, places) for section in sections))
        return {
            section.name: summarize(groups, section, self.run) for section, groups in zip(sections, found, strict=True)
        }

    async def _play_set(self, section: EvaluationSection, places: asyncio.Semaphore) -> list[Group]:
        return await asyncio.gather(
            *(self._play_task(section, i, task, places) for i, task in enumerate(self.sets[section.name]))
        )

    async def _play_task(self, section: EvaluationSection, place: int, task: Task, places: asyncio.Semaphore) -> Group:
        memo: Memo = {}
        order = (self.run.config.evaluation.index(section), place)
        seats = [Seat(self.run.config.seed, task.id, 0, member, order, "eval") for member in range(section.n)]
        group = Group(task.id, place, task, 0)
        group.trajectories = await asyncio.gather(*(self._play(section, task, s, places, memo) for s in seats))
        await self.graders.score(group)
        return group

    async def _play(
        self, section: EvaluationSection, task: Task, seat: Seat, places: asyncio.Semaphore, memo: Memo
    ) -> Trajectory:
        async with places:
            self.engine.enter("eval")
            try:
                sampling = sampling_for(section, self.run.config)
                return await self.players.single(task, seat, sampling, section.name, memo)
            finally:
                self.engine.leave("eval")


def main(target: Path, overrides: Sequence[str] = ()) -> int:
    """``relax eval``: play every evaluation set on the newest checkpoint of a run. Returns the exit code.

    ``target``: a run's directory or its run file. Nothing in the run's directory is changed.
    """
    from relax_core.config.resolve import load
    from relax_core.progress import results_table
    from relax_core.run import Run
    from relax_core.screen import Screen

    config, stack = load(target / "config.yaml" if target.is_dir() else target, overrides)
    if not config.evaluation:
        raise ConfigError(f"{target}: evaluation is empty: list the sets to play")
    run = Run(config, config.runs / config.name, stack)
    with Screen(run) as screen:
        results = asyncio.run(_evaluate_newest(run, screen))
        screen.console.print(results_table(results))
    return 0


async def _evaluate_newest(run: Run, screen: Screen) -> Results:
    from relax_core.system import assembled

    async with assembled(run, screen, readonly=True) as system:
        if system.first_step == 0:
            screen.note(f"{run.directory}: no checkpoint is there: these are the results of the initial weights")
        await system.publish(system.first_step)
        return await system.evaluator.evaluate(run.config.evaluation)


def sampling_for(section: EvaluationSection, run: RunConfig) -> Sampling:
    """How a set is sampled: as it says, or greedily with the run's limits."""
    if section.sampling is None:
        return replace(sampling_of(run.sampling), temperature=0.0)
    return sampling_of(section.sampling)


class Readable:
    """Chooses the tasks of a set: the first of its split that can be read, what is too long treated by the run's rule.

    Every row is tried once, before the run: its media decode and its prompt has its tokens. Bad ones are counted.
    """

    def __init__(self, prompts: Prompts, pool: Executor, bad: BadRows) -> None:
        self.prompts, self.pool, self.bad = prompts, pool, bad

    def tasks(self, section: EvaluationSection, split: Sequence[Task]) -> list[Task]:
        """Raises ConfigError when there are not as many as are asked for, DataError when too many rows are bad."""
        wanted = len(split) if section.size is None else section.size
        found: list[Task] = []
        place = 0
        while len(found) < wanted and place < len(split):
            places = range(place, min(place + wanted - len(found), len(split)))
            made = list(self.pool.map(lambda i: self._try(split, i), places))
            for i, task in zip(places, made, strict=True):
                if isinstance(task, Task):
                    found.append(replace(task, id=f"eval/{section.name}/{task.id}", environment=section.environment))
                elif not isinstance(task, TooLong):
                    label = f"{section.environment}/eval"
                    self.bad.add(label, label, i, str(task), len(split))
            place = places.stop
        if not found or (section.size is not None and len(found) < wanted):
            raise ConfigError(
                f"evaluation.{section.name}.size: {wanted} items asked for, the eval split of environment "
                f"{section.environment!r} has {len(split)}, {len(found)} of which can be read: lower size, or give it "
                "more"
            )
        return found

    def _try(self, split: Sequence[Task], index: int) -> Task | DataError:
        try:
            prompt = self.prompts.make(split[index])
        except DataError as error:
            return located(split, index, error)
        self.prompts.adapter.media.release(prompt.keys)
        return prompt.task


def summarize(groups: Sequence[Group], section: EvaluationSection, run: Run) -> dict[str, float]:
    """mean@n of correctness and reward over tasks, their standard error, and pass@k.

    ``play/...`` are the means of what was noted of plays.

    Plays that failed or whose deciding reward abstained are left out and counted. Standard error: of the mean over
    tasks. pass@k: the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), for k = 1, 2, 4 ... and n.
    """
    name = section.correct or run.config.rewards[0].label
    correct = [[float(v > section.threshold) for v in _values(group, name)] for group in groups]
    judged = [c for c in correct if c]
    means = [sum(c) / len(c) for c in judged]
    plays = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in plays if t.reward is not None]
    result = {
        "accuracy": _mean(means),
        "stderr": _standard_error(means),
        "reward": _mean(rewards),
        "length": _mean([t.reply_tokens for t in plays]),
        "items": float(len(groups)),
        "n": float(section.n),
        "failed": float(sum(t.error is not None for t in plays)),
        "unjudged": float(len(plays) - sum(map(len, correct))),
    }
    result |= {f"play/{key}": mean for key, mean in noted_means(plays).items()}
    ks = sorted({2**i for i in range(section.n.bit_length())} | {section.n}) if section.n > 1 else []
    for k in ks:
        result[f"pass@{k}"] = _mean([pass_at(k, len(c), int(sum(c))) for c in judged if len(c) >= k])
    return result


def pass_at(k: int, n: int, correct: int) -> float:
    """The chance that k of n plays, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _values(group: Group, reward: str) -> list[float]:
    return [v for t in group.trajectories if (v := t.rewards.get(reward)) is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
