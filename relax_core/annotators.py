"""The stages that make what the algorithm needs beyond what was sampled: built, and guarded.

They come from plugins. Whatever goes wrong in one ends the run with an error that names it, and what it forgets to make
is an error instead of a run that waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_core.config.columns import StagePlan
from relax_core.errors import PluginError, RelaxError
from relax_core.hook_manager import describe
from relax_core.interfaces import Columns, Stage, Streaming
from relax_core.old_policy import prepares, recomputes_old
from relax_core.setup import StageSetup

if TYPE_CHECKING:
    from relax_core.bus import Claim
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Algorithm, ModelAdapter, Trainer
    from relax_core.media import MediaStore
    from relax_core.run import Run
    from relax_core.weights import WeightUpdate

MOST_GROUPS = 8
"""Groups of one claim where training may begin before the step's rollout is complete."""


def annotator(
    plan: StagePlan,
    run: Run,
    algorithm: Algorithm,
    adapter: ModelAdapter,
    media: MediaStore,
    trainer: Trainer | None = None,
    old_apart: bool = False,
) -> Stage:
    """The stage of one of ``planned_stages``. Raises RelaxError when it cannot be built. ``old_apart``: see
    ``groups_at_once``."""
    claims = groups_at_once(run.config, algorithm, old_apart)
    setup = StageSetup(run, adapter, media, plan.columns, *claims, trainer)
    stage: Stage = run.stack.build("stages", plan.section, setup, where=plan.where)
    who = run.stack.provided("stages", plan.section.id).who
    return Guarded(stage, plan, f"{plan.where}: {who}: stage {plan.section.id!r}")


def groups_at_once(
    run: RunConfig, algorithm: Algorithm, old_apart: bool = False
) -> tuple[int, bool, Literal["any", "started"]]:
    """How a stage should claim whole groups: count, exactly so many, order.

    Many at once are computed faster, but which are together must not depend on timing, since sums of floats depend on
    it: so many of them as a step has, or a part of these, in the order in which they started. All of a step's where the
    trainer waits for them anyway. One by one with ``order: finished``, where an eviction would leave a claim that never
    is full. ``old_apart``: the old policy is a role of its own, for which the trainer need not wait (old_policy.py).
    """
    if run.order == "finished":
        return 1, False, "any"
    for_old = recomputes_old(run, algorithm) and (not old_apart or prepares(algorithm))
    waits = for_old or algorithm.streaming is Streaming.BATCH
    most = run.groups_per_step if waits else MOST_GROUPS
    count = max(n for n in range(1, most + 1) if run.groups_per_step % n == 0)
    return count, True, "started"


class Guarded(Stage):
    """A stage whose errors name it, and whose columns are there. ``who``: what errors call it."""

    def __init__(self, stage: Stage, plan: StagePlan, who: str) -> None:
        self.stage, self.columns, self.who = stage, plan.columns, who
        self.name, self.needs, self.by = stage.name, stage.needs, stage.by
        self.count, self.exact, self.order = stage.count, stage.exact, stage.order

    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        with self._errors():
            made = await self.stage.run(claim)
            for row in claim.rows:
                if missing := sorted(self.columns - set(made.get(row.id, {}))):
                    raise PluginError(f"{self.who} made no {missing[0]!r} for row {row.id}; run() must give it")
            return made

    async def load_weights(self, update: WeightUpdate) -> None:
        with self._errors():
            await self.stage.load_weights(update)

    def save(self, folder: Path) -> None:
        with self._errors():
            self.stage.save(folder)

    def load(self, folder: Path) -> None:
        with self._errors():
            self.stage.load(folder)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RelaxError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PluginError(f"{self.who} was cancelled from within: something it awaited was") from error
        except Exception as error:
            raise PluginError(f"{self.who} failed: {describe(error)}") from error
