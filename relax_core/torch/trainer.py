"""The embedded trainer: gradients of micro-batches, summed, divided once, clipped, and given to AdamW."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_core.actor_critic import CRITIC
from relax_core.errors import CheckpointError, ConfigError, RelaxError
from relax_core.interfaces import VALUES, Algorithm, Columns, Cut, Row, StepResult, Trainer
from relax_core.setup import TrainerSetup
from relax_core.torch.accumulate import Accumulator
from relax_core.torch.annotate import check_outputs
from relax_core.torch.config import TrainerConfig
from relax_core.torch.critic import Critic
from relax_core.torch.pieces import Pieces
from relax_core.torch.policy import Policy
from relax_core.torch.ranks import ALONE
from relax_core.torch.step_state import StepState, units_of
from relax_core.torch.tally import means
from relax_core.torch.team import Team
from relax_core.torch.trained import device_of
from relax_core.torch.trainee import Trainee
from relax_core.torch.updates import Updates

OWN = frozenset({"loss", "grad_norm", "lr", "computed_tokens", "nonfinite"})
"""Metrics that every trainee has."""
_BUDGETS = {"cpu": 4096}


class TorchTrainer(Trainer):
    """Trains its own copy of the model, as the policy, or as the critic of an algorithm that asks for values.

    Dropout is off, since engine and trainer must agree on the policy. On a CPU equal cuts give equal bits.

    Over several ranks rank 0 is the trainer that others see, and the gradient is that of one rank. On the other ranks
    ``follow`` does what rank 0 does; or each method is called there as on rank 0, without plan and rows.
    """

    Config = TrainerConfig
    config: TrainerConfig

    def __init__(self, config: TrainerConfig, setup: TrainerSetup) -> None:
        super().__init__(config)
        self.adapter, self.run, self.ranks = setup.adapter, setup.run, setup.ranks or ALONE
        self.outputs = setup.outputs
        check_outputs(setup.outputs, Policy.outputs | VALUES, f"algorithm {self.run.config.algorithm.id}")
        if problems := [f"trainer.{line}" for line in config.unused(setup.outputs)]:
            raise ConfigError(*problems)
        self.device = device_of(config)
        if self.device == "cpu" or config.threads:
            torch.set_num_threads(config.threads or 1)
        budget = config.tokens_per_micro_batch or _BUDGETS.get(self.device, 16384)
        build = Critic if setup.learner == "critic" else Policy
        self.trainee: Trainee[Any] = build(config, self.run, self.adapter, budget, self.ranks)
        self.learner, self.compute = self.trainee.learner, self.trainee.compute
        self._pieces = Pieces(self.compute.kind, budget)
        self.accumulator = Accumulator(self.run, self.trainee, self._pieces)
        self.updates = Updates(self.run, self.trainee.name, self.learner, self.ranks)
        self.still = asyncio.Lock()
        """Held while rows are computed or the weights move: what a call gives is of one version."""
        self.team = Team(self)
        """The other ranks, as this one sees them."""
        self.asleep = False
        self.sleeps = self.wakes = 0

    # --- micro-batches ------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Of all ranks together."""
        return self._pieces.budget * self.ranks.size

    def cost(self, rows: Sequence[Row]) -> int:
        return self._pieces.cost(rows)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """See ``Trainer.forward``. Nothing on other ranks than rank 0."""
        self._check_values(outputs, "forward")
        check_outputs(outputs, self.trainee.outputs, "forward")
        self._check_awake()
        if not self.ranks.alone:
            return await self.team.forward(rows, outputs)
        async with self.still:
            return await self.trainee.forward(rows, outputs)

    def _check_values(self, outputs: frozenset[str], who: str) -> None:
        if outputs & VALUES and not self.outputs & VALUES:
            raise ConfigError(
                f"{who}: asks for the output 'values', but this trainer was built without a critic, for an algorithm "
                "whose outputs do not name them; name them there"
            )

    # --- a step -------------------------------------------------------------------------------------------------------

    async def step(self, step: int, plan: AsyncIterator[Cut] | None, algorithm: Algorithm) -> StepResult:
        """See ``Trainer.step``; steps count from 0. Yields to the event loop after every micro-batch.

        An update is skipped, with weights and optimizer as they were, when nothing of it is trained, or when its
        gradient is exactly zero or not finite. Raises RelaxError after ``max_nonfinite`` in a row that are not finite.

        Other ranks than rank 0 have no plan, and an empty result. An error of one rank is raised on all of them.
        """
        who = f"algorithm {type(algorithm).__name__}"
        self._check_values(algorithm.outputs, who)
        own = algorithm.outputs & VALUES if self.trainee.name == "critic" else algorithm.outputs - VALUES
        check_outputs(own, self.trainee.outputs, who)
        self._check_awake()
        if plan is None or not self.ranks.alone:
            return await self.team.step(step, plan, algorithm)
        state = self.begin_state(step, algorithm)
        async for cut in plan:
            state.cuts.append(([row.id for row in cut.rows], cut.last))
            state.open = True
            state.units += units_of(cut.rows)
            self.accumulator.add(state, cut.rows)
            if cut.last:
                async with self.still:
                    self.updates.end(state)
            await asyncio.sleep(0)
        if state.open:
            raise RelaxError(f"trainer: the plan of step {step} ended within an update; end it with a cut of last=True")
        return self.result(state)

    def begin_state(self, step: int, algorithm: Algorithm) -> StepState:
        """Of a new step; what is left of an earlier one is forgotten."""
        self.learner.optimizer.clear()
        self._pieces.clear()
        return StepState(step, algorithm)

    def result(self, state: StepState) -> StepResult:
        """Of a step that has ended. Collective."""
        parts = self.ranks.collect((state.tally.sums(), state.computed))
        metrics = means([sums for sums, _ in parts]) | {
            "lr": self.learner.learning_rate(state.number),
            "computed_tokens": sum(computed for _, computed in parts),
            "nonfinite": state.nonfinite,
        }
        named = {f"{self.trainee.prefix}{name}" if name in OWN else name: value for name, value in metrics.items()}
        return StepResult(named, tuple(state.moved), state.cuts)

    async def follow(self, algorithm: Algorithm) -> None:
        """On another rank than rank 0: do what rank 0 does, until it calls ``release``.

        Errors that rank 0 raises too do not end it. Raises RelaxError when the other ranks are lost.
        """
        await self.team.follow(algorithm)

    def release(self) -> None:
        """On rank 0: end the other ranks' ``follow``."""
        self.team.do("release")

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Also on other ranks where the parameters are divided: all must be taken then, on every rank."""
        if self.learner.shards is not None:
            self.team.announce("weights")
        yield from self.learner.weights()

    def frozen_names(self) -> frozenset[str]:
        return self.learner.frozen_names()

    def save(self, folder: Path) -> None:
        """The same files for any number of ranks and any sharding."""
        self.team.do("save", folder)

    def load(self, folder: Path) -> None:
        self.team.do("load", folder)

    def save_here(self, folder: Path) -> None:
        """``save`` on this rank. Collective."""
        self.learner.save(folder)

    def load_here(self, folder: Path) -> None:
        """``load`` on this rank. Collective."""
        if self.trainee.name == "policy":
            self._check_critic(folder)
        self.learner.load(folder)

    def _check_critic(self, folder: Path) -> None:
        """Raise CheckpointError where one is in the checkpoint and none in the run, or the other way round."""
        found, needed = (folder / CRITIC).is_dir(), bool(self.outputs & VALUES)
        error: CheckpointError | None = None
        if self.ranks.first and found != needed:
            has, needs = ("a", "needs none") if found else ("no", "needs one")
            error = CheckpointError(
                f"trainer: {folder} has {has} critic, and this run's algorithm {needs}: it is of a run with another "
                "algorithm; go on with that one, or begin a new run"
            )
        self.ranks.agree(error)

    # --- memory -------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Free the accelerator for the engine: weights, masters and averages move to main memory.

        ``forward`` and ``step`` are errors until ``wake``.
        """
        await self.team.do_async("sleep")

    async def wake(self) -> None:
        """Undo ``sleep``, with the same bits."""
        await self.team.do_async("wake")

    def sleep_here(self) -> None:
        """``sleep`` on this rank; once is enough."""
        if not self.asleep:
            if self.device != "cpu":
                self.learner.leave()
                torch.cuda.empty_cache()
            self.asleep, self.sleeps = True, self.sleeps + 1

    def wake_here(self) -> None:
        """``wake`` on this rank."""
        if self.asleep:
            if self.device != "cpu":
                self.learner.enter(self.device)
            self.asleep, self.wakes = False, self.wakes + 1

    def memory(self) -> dict[str, int]:
        """Bytes on this rank's device: ``weights``, ``masters``, ``gradients``, ``optimizer``."""
        found = dict.fromkeys(("weights", "masters", "gradients", "optimizer"), 0)
        for kind, tensor in self.learner.tensors():
            found[kind] += tensor.nbytes if tensor.device.type == self.device else 0
        return found

    def _check_awake(self) -> None:
        if self.asleep:
            raise RelaxError("trainer: it sleeps, its memory is the engine's now; wake() it before it computes")
