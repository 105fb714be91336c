"""The stage loop, and the core's own stages: score a group, and turn its rewards into advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from relax_core.admission import Outcome
from relax_core.bus import BusClosed
from relax_core.hookspecs import GroupEvent
from relax_core.interfaces import Columns, Member, Row, ScoredGroup, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from relax_core.admission import Admission
    from relax_core.bus import Bus, Claim, Holder
    from relax_core.interfaces import Algorithm
    from relax_core.run import Run
    from relax_core.scoring import Graders
    from relax_core.types import Group
    from relax_core.weights import WeightUpdate


async def serve(stage: Stage, bus: Bus, name: str) -> None:
    """Run a stage until the bus is closed: claim, work, finish.

    What a dead worker had claimed is offered again; what it still sends is refused (see ``Bus.declare_dead``).
    """
    holder = bus.register(name)
    await serve_as(holder, stage, bus)


async def serve_as(holder: Holder, stage: Stage, bus: Bus) -> None:
    """``serve`` as an incarnation that is registered already."""
    with suppress(BusClosed):
        while True:
            claim = await bus.claim(stage.name, stage.needs, stage.count, stage.by, holder, stage.order, stage.exact)
            await bus.finish(claim, await stage.run(claim))


class Placed(ABC):
    """A stage where the runtime has put it."""

    @abstractmethod
    async def serve(self, bus: Bus) -> None:
        """Let it work until the bus is closed; raises what ends it."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """See ``Stage``."""

    def save(self, folder: Path) -> None:
        """See ``Stage``."""

    def load(self, folder: Path) -> None:
        """See ``Stage``."""


class Here(Placed):
    """In this process."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.name = stage, name
        self.load_weights, self.save, self.load = stage.load_weights, stage.save, stage.load  # type: ignore[method-assign]

    async def serve(self, bus: Bus) -> None:
        await serve(self.stage, bus, self.name)


class Score(Stage):
    """Rewards, shaping and filtering: makes ``reward``, or gives the group's slot back.

    The rollout's column ``played`` is the group before; ``group`` and ``trajectory`` are what it is from here on.
    Rewards are asked within a ``turn``: that of the engine, where they ask it.
    """

    name = "score"
    needs = frozenset({"media", "played"})
    by = "group"

    def __init__(
        self,
        run: Run,
        graders: Graders,
        bus: Bus,
        admission: Admission,
        decided: Callable[[str, str | None], None],
        discarded: Callable[[Mapping[str, Columns]], None],
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.run_, self.graders, self.bus, self.admission = run, graders, bus, admission
        self.decided, self.discarded = decided, discarded
        self._turn = turn

    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        group: Group = claim.rows[0].columns["played"]
        stack, event = self.run_.stack, GroupEvent(group)
        async with self._turn():
            await self.graders.score(group)
        shaped = stack.pipe("shape_rewards", self.run_, [t.reward for t in group.trajectories], event)
        for trajectory, reward in zip(group.trajectories, shaped, strict=True):
            trajectory.reward = reward
        reason = stack.pipe("filter_group", self.run_, None, event)
        stack.hook.on_group_scored(run=self.run_, event=event)
        problem = self._problem(group)
        if reason is None and problem is None:
            self.decided(group.id, None)
            return scored_columns(group, claim.rows)
        await self.bus.evict(group.id)
        self.discarded({row.id: row.columns for row in claim.rows})
        unscored = all(t.raw_reward is None for t in group.trajectories)
        if unscored:
            self.admission.end(group.id, Outcome.FAILED)
        else:
            self.admission.end(group.id, Outcome.FILTERED, reason or problem)
        self.decided(group.id, problem)
        return {}

    def _problem(self, group: Group) -> str | None:
        """Why no play of the group can be trained; a run in which that goes on and on must end."""
        if all(t.raw_reward is None for t in group.trajectories):
            return f"every reward abstained{self.graders.failures_in_words()}"
        if all(t.reward is None for t in group.trajectories):
            return "its plays were scored, but shape_rewards left none of them a reward"
        return None


def scored_columns(group: Group, rows: Sequence[Row]) -> dict[str, Columns]:
    """What scoring adds to each of a group's rows."""
    found: dict[str, Columns] = {}
    members = {t.member: t for t in group.trajectories}
    for row in rows:
        trajectory = members[row.member]
        found[row.id] = {"reward": trajectory.reward, "group": group, "trajectory": trajectory}
    return found


class Advantages(Stage):
    """Credit: the algorithm's ``advantages`` of each group, and each row's share in the loss.

    Algorithms that need the whole step are asked by the step itself (see step.py), which knows its groups.
    """

    name = "advantages"
    by = "group"

    def __init__(self, algorithm: Algorithm, from_trainer: frozenset[str]) -> None:
        self.algorithm = algorithm
        self.needs = frozenset({"reward", "mask", "logprobs", "group", "trajectory"}) | (algorithm.needs - from_trainer)

    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        return self.algorithm.advantages(scored_groups(claim.rows))


def scored_groups(rows: tuple[Row, ...] | list[Row]) -> list[ScoredGroup]:
    """Rows, in order, as the scored groups an algorithm sees."""
    groups: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        member = row.columns["trajectory"].member
        groups.setdefault(row.group, {}).setdefault(member, []).append(row)
    return [
        ScoredGroup(
            id=group,
            task=next(iter(members.values()))[0].columns["trajectory"].task,
            members=[_member(found) for found in members.values()],
        )
        for group, members in groups.items()
    ]


def _member(rows: list[Row]) -> Member:
    trajectory = rows[0].columns["trajectory"]
    return Member(rows[0].columns["reward"], trajectory.rewards, rows)
