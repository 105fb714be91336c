"""One step's groups on their way from the bus into the trainer, and what is recorded of them."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.ahead import ahead
from relax_core.bus import merge
from relax_core.config.columns import values_in_step
from relax_core.errors import RelaxError
from relax_core.hookspecs import BatchReady
from relax_core.interfaces import TRAINER_COLUMNS, VALUES, Row, StepResult, Streaming
from relax_core.journal import JournalEntry, RecordedCut
from relax_core.old_policy import prepared, prepares, recomputes_old, with_old_policy
from relax_core.play_counts import count_metrics, noted_means
from relax_core.stages import scored_groups
from relax_core.types import Version

if TYPE_CHECKING:
    from relax_core.bus import Claim
    from relax_core.system import System
    from relax_core.types import Group, Trajectory

SAMPLED = frozenset({"tokens", "mask", "logprobs", "versions", "positions", "media", "trajectory", "group", "reward"})
CREDIT = frozenset({"advantages", "weight", "units"})


class StepGroups:
    """Iterates over the step's groups, each as its rows, in training order, as they become ready.

    ``order: started`` takes them as they started, so none can exceed the bound on lag. ``order: finished`` takes them
    as they finished; one that has become too old meanwhile is evicted and played again.

    Where the old policy's log-probs are wanted and it is a role of its own, it computes each group as soon as that is
    claimed, beside the rollout and the training of groups before it; where it is the trainer, all groups are awaited.
    """

    def __init__(self, system: System, step: int) -> None:
        self.system, self.step = system, step
        self.values = values_in_step(system.algorithm, system.turns.shared)
        """Whether the critic is asked here, since it slept while stages worked."""
        self.credits = self.values or system.algorithm.streaming is Streaming.BATCH
        """Whether credit belongs to the whole step, and so is given here, when its groups are known."""
        made = frozenset() if self.credits else CREDIT | system.algorithm.makes
        given = TRAINER_COLUMNS | (VALUES if self.values else frozenset())
        self.needs = SAMPLED | made | (system.algorithm.needs - given)
        self.claims: list[Claim] = []
        self.rows: list[Row] = []
        self.groups: list[Group] = []
        self.old, self.version = system.roles.old_policy, Version(system.lineage, step)
        self.recomputes = recomputes_old(system.run.config, system.algorithm)
        self._gathered: list[Sequence[Row]] | None = None
        self.started = time.perf_counter()
        self.waited = 0.0

    async def __aiter__(self) -> AsyncIterator[Sequence[Row]]:
        groups, algorithm = self._credited(), self.system.algorithm
        if self.system.run.config.old == "engine":
            groups = _with_engines_own(groups)
        elif self.recomputes and (not self.old.apart or prepares(algorithm)):
            groups = self._whole(groups)
        async for rows in groups:
            self.rows += rows
            yield rows

    async def _whole(self, groups: AsyncIterator[Sequence[Row]]) -> AsyncIterator[Sequence[Row]]:
        """Once all are there: with what the algorithm makes of all old log-probs, and with these, if they lack them."""
        taken = [rows async for rows in groups]
        flat = [row for rows in taken for row in rows]
        if not self.old.apart:
            flat = await with_old_policy(self.old, flat, self.version)
        whole = iter(prepared(self.system.algorithm, flat))
        for rows in taken:
            yield [next(whole) for _ in rows]

    async def _credited(self) -> AsyncIterator[Sequence[Row]]:
        """The rows of each group with their credit."""
        if not self.credits:
            async for rows in self._in_turn():
                yield rows
            return
        groups = [rows async for rows in self._in_turn()]
        if self.values:
            groups = await self._valued(groups)
        credit = self.system.algorithm.advantages(scored_groups([row for rows in groups for row in rows]))
        self._announce()
        for rows in groups:
            yield [row.having(credit[row.id]) for row in rows]

    async def _valued(self, groups: Sequence[Sequence[Row]]) -> list[Sequence[Row]]:
        """The groups' rows with the critic's values."""
        flat = [row for rows in groups for row in rows]
        found = iter(await self.system.trainer.forward(flat, VALUES))
        return [[row.having(next(found)) for row in rows] for rows in groups]

    async def ready(self) -> None:
        """Where the trainer shares the engine's devices: take all groups, then hand the devices over."""
        if self.system.turns.shared:
            self._gathered = [rows async for rows in self._waiting(self._claimed())]
            await self.system.end_evaluation()
            await self.system.turns.to_trainer()

    async def _in_turn(self) -> AsyncIterator[Sequence[Row]]:
        """As they are claimed, or as they were by ``ready``. An old policy of its own gets them at once."""
        if self._gathered is not None:
            for rows in self._gathered:
                yield rows
            return
        groups = self._claimed()
        if self.recomputes and self.old.apart:
            groups = ahead(groups, lambda rows: with_old_policy(self.old, rows, self.version), self.system.beside)
        async for rows in self._waiting(groups):
            yield rows

    async def _waiting(self, groups: AsyncIterator[Sequence[Row]]) -> AsyncIterator[Sequence[Row]]:
        """The same groups; the time until each comes is counted."""
        while True:
            asked = time.perf_counter()
            rows = await anext(groups, None)
            self.waited += time.perf_counter() - asked
            if rows is None:
                return
            yield rows

    async def _claimed(self) -> AsyncIterator[Sequence[Row]]:
        config, bus = self.system.run.config, self.system.bus
        while (missing := config.groups_per_step - len(self.groups)) > 0:
            claim = await bus.claim("train", self.needs, missing, "group", self.system.holder, config.order)
            by_group: dict[str, list[Row]] = defaultdict(list)
            for row in claim.rows:
                by_group[row.group].append(row)
            fresh = [g for g in claim.groups if await self._fresh(by_group[g][0].columns["group"], by_group[g])]
            self.claims.append(replace(claim, groups=tuple(fresh), rows=tuple(r for g in fresh for r in by_group[g])))
            for group in fresh:
                self.groups.append(by_group[group][0].columns["group"])
                if not self.credits and len(self.groups) == config.groups_per_step:
                    self._announce()
                yield by_group[group]

    def _announce(self) -> None:
        event = BatchReady(self.step, tuple(g.id for g in self.groups))
        self.system.run.stack.hook.on_batch_ready(run=self.system.run, event=event)

    async def _fresh(self, group: Group, rows: list[Row]) -> bool:
        """Whether the group may be trained now. One that is too old never is."""
        config = self.system.run.config
        lag = self.step - (self.step if group.version is None else group.version)
        if lag <= config.max_staleness:
            return True
        if config.order == "started":
            raise RelaxError(f"group {group.id} lags {lag} versions behind, more than max_staleness: a fault of Relax")
        await self.system.bus.evict(group.id)
        self.system.roles.players.forget({row.id: row.columns for row in rows})
        ticket = self.system.admission.evict(group.id)
        if ticket is not None:
            await self.system.rollout.start(ticket)
        return False

    @property
    def ids(self) -> list[str]:
        return [group.id for group in self.groups]

    async def acknowledge(self) -> None:
        """All rows of the step at once; they stay on the bus until a checkpoint covers it."""
        await self.system.bus.ack(merge(self.claims), retain=self.step)

    def journal_entry(self, result: StepResult) -> JournalEntry:
        cuts = tuple(RecordedCut(tuple(ids), last) for ids, last in result.cuts)
        return JournalEntry(self.step, self.groups, self.rows, cuts, result.updates, result.metrics, result.skipped)


async def _with_engines_own(groups: AsyncIterator[Sequence[Row]]) -> AsyncIterator[Sequence[Row]]:
    """The engine's log-probs taken for those of the old policy."""
    async for rows in groups:
        yield [row.having({"old_logprobs": row.columns["logprobs"]}) for row in rows]


def step_metrics(system: System, groups: StepGroups, result: StepResult) -> dict[str, Any]:
    """Everything that is logged of a step. Keys under ``time/`` differ between equal runs, the others do not."""
    seconds = time.perf_counter() - groups.started
    plays = [t for group in groups.groups for t in group.trajectories]
    lags = _lags(groups)
    _add_totals(system, groups, result, lags)
    counts = system.rollout.plays.take()
    tokens = sum(lags.values())
    metrics: dict[str, Any] = {
        "reward": _mean([t.raw_reward for t in plays if t.raw_reward is not None]),
        "lag/mean": sum(lag * n for lag, n in lags.items()) / tokens if tokens else 0.0,
        "lag/max": max(lags, default=0),
        **{f"lag/tokens/{lag}": lags[lag] for lag in range(system.run.config.max_staleness + 1)},
        "length/trained": _mean([t.reply_tokens for t in plays if t.error is None]),
        "length/played": counts["tokens"] / counts["plays"] if counts["plays"] else None,
        **count_metrics(counts),
        "train/updates": result.updates,
        "train/skipped": result.skipped,
        "train/cuts": len(result.cuts),
        "train/tokens": tokens,
    }
    metrics |= {f"train/{key}": value for key, value in result.metrics.items()}
    credit = system.algorithm.group_metrics(scored_groups(groups.rows))
    metrics |= {f"credit/{key}": total / count if count else None for key, (total, count) in credit.items()}
    metrics |= _by_environment(system, groups)
    metrics |= {f"groups/{key}": value for key, value in system.admission.counters().items()}
    metrics |= {"data/bad_rows": sum(system.feed.bad.counts().values())}
    metrics |= {f"data/prompts_{key}": system.feed.counts[key] for key in ("cut", "too_long")}
    metrics |= {
        f"rewards/{name}/failures": sum(t.metrics.get(f"{name}/failures", 0) for t in plays)
        for name in (section.label for section in system.run.config.rewards)
    }
    metrics |= {
        f"rewards/{name}/abstained": sum(t.rewards.get(name, 0.0) is None for t in plays)
        for name in (section.label for section in system.run.config.rewards)
    }
    metrics |= {
        "time/step": seconds,
        "time/wait": groups.waited,
        "time/publish": system.published[0],
        "time/publish_gb_per_s": system.published[1] / system.published[0] / 1e9,
        "time/tokens_per_s": tokens / seconds,
    }
    return metrics


def _by_environment(system: System, groups: StepGroups) -> dict[str, float | None]:
    """Mean total reward, each reward's own mean, and the means of what was noted of plays, by environment."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups.groups:
        name = group.task.environment
        for t in group.trajectories:
            if t.raw_reward is not None:
                values[f"environments/{name}/reward"].append(t.raw_reward)
            for label, value in t.rewards.items():
                if value is not None:
                    values[f"environments/{name}/{label}"].append(value)
    means = {key: _mean(found) for key, found in sorted(values.items())}
    plays: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups.groups:
        plays[group.task.environment] += group.trajectories
    for name, found in sorted(plays.items()):
        means |= {f"environments/{name}/play/{key}": mean for key, mean in noted_means(found).items()}
    return means


def _lags(groups: StepGroups) -> Counter[int]:
    """Trained tokens by lag: steps between the policy that sampled and the trainer."""
    import numpy as np

    lags: Counter[int] = Counter()
    for row in groups.rows:
        versions = row.columns["versions"][row.columns["mask"] > 0]
        for version, n in zip(*np.unique(versions, return_counts=True), strict=True):
            lags[groups.step - int(version)] += int(n)
    return lags


def _add_totals(system: System, groups: StepGroups, result: StepResult, lags: Counter[int]) -> None:
    counts = system.rollout.plays.counts
    trained = [t.reply_tokens for g in groups.groups for t in g.trajectories if t.error is None]
    played = (counts["plays"], counts["tokens"])
    system.totals.counts.failed_plays += counts["errors"]
    system.totals.add(lags, result.skipped, played, (len(trained), sum(trained)))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
