"""Policy and critic as one trainer: each trains on the same plan, at the same time, wherever it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_core.interfaces import VALUES, Algorithm, Columns, Cut, Row, StepResult, Trainer
from relax_core.setup import TrainerSetup

if TYPE_CHECKING:
    import torch

    from relax_core.interfaces import ModelAdapter
    from relax_core.run import Run

T = TypeVar("T")
CRITIC = "critic"
"""The critic's folder in that of the trainer, in a checkpoint."""


def build_trainer(run: Run, adapter: ModelAdapter, outputs: frozenset[str], training: bool = True) -> Trainer:
    """The run's trainer in this process; with a critic where ``outputs``, those of the algorithm, have values.

    ``training`` False: of policy alone, which is all that an evaluation needs.
    """

    def build(setup: TrainerSetup) -> Trainer:
        trainer: Trainer = run.stack.build("trainers", run.config.trainer, setup, where="trainer")
        return trainer

    policy = build(TrainerSetup(adapter, run, outputs))
    if not (training and outputs & VALUES):
        return policy
    return ActorCritic(policy, build(TrainerSetup(adapter, run, outputs, learner="critic")))


class ActorCritic(Trainer):
    """Two trainers behind the interface of one. Micro-batches are cut as the policy's trainer likes them.

    Its checkpoint is the policy's, with the critic's in a folder ``critic`` of it.
    """

    def __init__(self, policy: Trainer, critic: Trainer) -> None:
        super().__init__(policy.config)
        self.policy, self.critic = policy, critic

    @property
    def budget(self) -> int:
        return self.policy.budget

    def cost(self, rows: Sequence[Row]) -> int:
        return self.policy.cost(rows)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """``values`` of the critic, all others of the policy."""
        if not outputs & VALUES:
            return await self.policy.forward(rows, outputs)
        if outputs <= VALUES:
            return await self.critic.forward(rows, outputs)
        both = await together(self.policy.forward(rows, outputs - VALUES), self.critic.forward(rows, VALUES))
        return [{**ours, **values} for ours, values in zip(*both, strict=True)]

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        """An update counts when one of both moved. An error of one ends the step of both.

        ``loss`` is the sum of both losses; the critic's share of it is ``critic_loss``.
        """
        shared = _Shared(plan)
        policy, critic = await together(
            self.policy.step(step, shared.first(), algorithm), self.critic.step(step, shared.second(), algorithm)
        )
        metrics = {**policy.metrics, **critic.metrics}
        if "loss" in metrics and "critic_loss" in metrics:
            metrics["loss"] += metrics["critic_loss"]
        else:  # of one it is not finite
            metrics.pop("loss", None)
        moved = tuple(ours or theirs for ours, theirs in zip(policy.moved, critic.moved, strict=True))
        return StepResult(metrics, moved, policy.cuts)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's."""
        return self.policy.weights()

    def frozen_names(self) -> frozenset[str]:
        return self.policy.frozen_names()

    async def sleep(self) -> None:
        await together(self.policy.sleep(), self.critic.sleep())

    async def wake(self) -> None:
        await together(self.policy.wake(), self.critic.wake())

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        self.critic.save(folder / CRITIC)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        self.critic.load(folder / CRITIC)


async def together(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, T]) -> tuple[T, T]:
    """Both results. An error of one cancels the other, and is raised when that has ended too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(first), group.create_task(second)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()


class _Shared:
    """A plan for two who step through it. It is asked for a cut when the first one is; the second may lag behind."""

    def __init__(self, plan: AsyncIterator[Cut]) -> None:
        self._plan = plan
        self._later: deque[Cut | None] = deque()
        """What the second has yet to take; None: the plan's end."""
        self._news = asyncio.Event()

    async def first(self) -> AsyncIterator[Cut]:
        async for cut in self._plan:
            self._pass_on(cut)
            yield cut
        self._pass_on(None)

    def _pass_on(self, cut: Cut | None) -> None:
        self._later.append(cut)
        self._news.set()

    async def second(self) -> AsyncIterator[Cut]:
        while True:
            while not self._later:
                self._news.clear()
                await self._news.wait()
            if (cut := self._later.popleft()) is None:
                return
            yield cut
