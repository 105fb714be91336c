"""The training loop of Relax: read it top to bottom.

    tasks -> [rollout] -> rows on the bus -> [score] -> [advantages] -> [train] -> weights, version + 1 -> [engine]

Everything left of ``train`` runs beside this loop (see rollout.py and stages.py), as far ahead as ``max_staleness``
allows: with 0 the next step's groups wait for the new weights, which is synchronous, on-policy training. One loop
serves both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.hookspecs import ExceptionEvent, StepEnd, StepStart
from relax_core.plan import plan

if TYPE_CHECKING:
    from relax_core.run import Run
    from relax_core.screen import Screen


async def train(run: Run, screen: Screen) -> None:
    """Play, score, credit, learn, publish; repeat. Resumes from the newest checkpoint in the run's directory."""
    from relax_core.step import StepGroups, step_metrics
    from relax_core.system import assembled

    config, hook = run.config, run.stack.hook
    async with assembled(run, screen) as system:
        # Engines are probed, and serve the trainer's weights, before anything is played.
        await system.probe()
        await system.publish(system.first_step)
        hook.on_train_start(run=run)

        async with system.at_work():  # the rollout and the stages, until this block ends
            if system.first_step == 0:
                await system.begin_evaluation(version=0)

            for step in range(system.first_step, config.steps):
                hook.on_step_start(run=run, event=StepStart(step))

                # Learn. Whole groups are taken in the order in which they started, as they become ready; micro-batches
                # are cut from them and trained at once where the algorithm allows. A cut never changes the gradient.
                groups = StepGroups(system, step)
                await groups.ready()
                cuts = plan(groups, system.trainer, config.updates_per_step, config.epochs, config.groups_per_step)
                result = await system.trainer.step(step, cuts, system.algorithm)

                # Account. One journal entry names what was trained, in which order and cuts; with it the rows are
                # acknowledged. They stay on the bus until a checkpoint covers this step.
                system.journal.write(groups.journal_entry(result))
                system.trajectories.write(step, groups.groups)
                await groups.acknowledge()
                gauges = await system.engine_gauges()

                # Publish, beside the next step where that may lag behind. An evaluation of the present version ends
                # first. The groups' slots are given back; what starts next starts when engines serve the new version.
                await system.end_evaluation()
                await system.begin_publication(step + 1)
                system.admission.step_taken(groups.ids, skipped=not result.updates)

                metrics = step_metrics(system, groups, result) | gauges
                system.log(step + 1, metrics)
                hook.on_step_end(run=run, event=StepEnd(step, metrics))

                await system.begin_evaluation(version=step + 1)
                if system.checkpoint_due(step + 1):
                    await system.end_evaluation()
                    await system.save(step + 1)

        hook.on_train_end(run=run)
        system.finish()


def run_training(run: Run, screen: Screen) -> None:
    """``train`` with its hooks for errors and for the end, in an event loop of its own."""
    hook = run.stack.hook
    hook.setup(run=run)
    try:
        asyncio.run(train(run, screen))
    except BaseException as error:
        hook.on_exception(run=run, event=ExceptionEvent(error))
        raise
    finally:
        hook.teardown(run=run)


def main(path: Path, overrides: Sequence[str]) -> int:
    """``relax train``: check, then train or resume, then show the results. Returns the exit code."""
    from relax_core.launch import prepare
    from relax_core.screen import Screen

    run = prepare(path, overrides)
    with Screen(run) as screen:
        try:
            run_training(run, screen)
        except KeyboardInterrupt:
            screen.note("interrupted; the same command goes on from the newest checkpoint")
            raise
        screen.results()
    return 0
