"""The embedded trainer: gradients of micro-batches, summed, divided once, clipped, and given to AdamW."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from relax_core.errors import CheckpointError, ConfigError, RelaxError
from relax_core.interfaces import Algorithm, Columns, Cut, Row, StepResult, Trainer
from relax_core.setup import TrainerSetup
from relax_core.torch.accumulate import VALUES, Accumulator
from relax_core.torch.annotate import PER_LINE, PER_TOKEN, Annotator, check_outputs
from relax_core.torch.config import TrainerConfig
from relax_core.torch.critic import Critic
from relax_core.torch.learner import Learner
from relax_core.torch.pieces import Pieces
from relax_core.torch.ranks import ALONE
from relax_core.torch.step_state import StepState, units_of
from relax_core.torch.tally import means
from relax_core.torch.team import Team
from relax_core.torch.trained import check_frozen, device_of, load_divided
from relax_core.torch.updates import Updates

OUTPUTS = PER_TOKEN | PER_LINE | VALUES
_BUDGETS = {"cpu": 4096}
_CRITIC = "critic"


class TorchTrainer(Trainer):
    """Trains its own copy of the model; and a critic, where the algorithm asks for values.

    Dropout is off, since engine and trainer must agree on the policy. On a CPU equal cuts give equal bits.

    Over several ranks rank 0 is the trainer that others see, and the gradient is that of one rank. On the other ranks
    ``follow`` does what rank 0 does; or each method is called there as on rank 0, without plan and rows.
    """

    Config = TrainerConfig
    config: TrainerConfig

    def __init__(self, config: TrainerConfig, setup: TrainerSetup) -> None:
        super().__init__(config)
        self.adapter, self.run, self.ranks = setup.adapter, setup.run, setup.ranks or ALONE
        check_outputs(setup.outputs, OUTPUTS, f"algorithm {self.run.config.algorithm.id}")
        if problems := [f"trainer.{line}" for line in config.unused(setup.outputs)]:
            raise ConfigError(*problems)
        self.device, steps = device_of(config), self.run.config.steps
        if self.device == "cpu" or config.threads:
            torch.set_num_threads(config.threads or 1)
        budget = config.tokens_per_micro_batch or _BUDGETS.get(self.device, 16384)
        self.model, shards = load_divided(config, self.adapter, self.ranks)
        check_frozen(config, self.model)
        self.policy = Learner(self.model, config, steps, "trainer", self.ranks, shards)
        temperature = self.run.config.sampling.temperature
        self.annotator = Annotator(self.model, self.adapter, config.layout, temperature, budget, shards)
        self.compute = self.annotator.compute
        wanted = setup.outputs & VALUES
        self.critic = Critic(config, self.adapter, steps, budget, self.ranks) if wanted else None
        self._learners = {"": self.policy} | ({} if self.critic is None else {"critic_": self.critic.learner})
        """By the beginning of their metrics' names."""
        self._pieces = Pieces(self.compute.kind, budget)
        self.accumulator = Accumulator(self.run, self.compute, self.critic, self._pieces)
        self.updates = Updates(self.run, self._learners, self.ranks)
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
        """``values`` of the critic, and what ``Annotator.forward`` gives. Nothing on other ranks than rank 0."""
        self._check(outputs, "forward")
        self._check_awake()
        if not self.ranks.alone:
            return await self.team.forward(rows, outputs)
        made: list[Columns] = [{} for _ in rows]
        if others := outputs - VALUES:
            made = await self.annotator.forward(rows, others)
        if outputs & VALUES and self.critic is not None:
            values = await self.critic.forward(rows)
            made = [{**columns, **own} for columns, own in zip(made, values, strict=True)]
        return made

    def _check(self, outputs: frozenset[str], who: str) -> None:
        check_outputs(outputs, OUTPUTS, who)
        if outputs & VALUES and self.critic is None:
            raise ConfigError(
                f"{who}: asks for the output 'values', but this trainer was built without a critic, for an algorithm "
                "whose outputs do not name them; name them there"
            )

    # --- a step -------------------------------------------------------------------------------------------------------

    async def step(self, step: int, plan: AsyncIterator[Cut] | None, algorithm: Algorithm) -> StepResult:
        """See ``Trainer.step``; steps count from 0. Yields to the event loop after every micro-batch.

        An update is skipped, with weights and optimizer as they were, when nothing of it is trained, or when its
        gradient is exactly zero or not finite. Policy and critic are skipped each for itself: an update counts when one
        of them moved. Raises RelaxError after ``max_nonfinite`` gradients of one that are not finite in a row.

        Other ranks than rank 0 have no plan, and an empty result. An error of one rank is raised on all of them.
        """
        self._check(algorithm.outputs, f"algorithm {type(algorithm).__name__}")
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
                async with self.critic.still if self.critic is not None else nullcontext():
                    self.updates.end(state)
            await asyncio.sleep(0)
        if state.open:
            raise RelaxError(f"trainer: the plan of step {step} ended within an update; end it with a cut of last=True")
        return self.result(state)

    def begin_state(self, step: int, algorithm: Algorithm) -> StepState:
        """Of a new step; what is left of an earlier one is forgotten."""
        for learner in self._learners.values():
            learner.optimizer.clear()
        self._pieces.clear()
        return StepState(step, algorithm)

    def result(self, state: StepState) -> StepResult:
        """Of a step that has ended. Collective."""
        parts = self.ranks.collect((state.tally.sums(), state.computed))
        metrics = means([sums for sums, _ in parts]) | {
            **{f"{name}lr": learner.learning_rate(state.number) for name, learner in self._learners.items()},
            "computed_tokens": sum(computed for _, computed in parts),
            "nonfinite": state.nonfinite,
        }
        return StepResult(metrics, state.updates, state.skipped, state.cuts)

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
        if self.policy.shards is not None:
            self.team.announce("weights")
        yield from self.policy.weights()

    def frozen_names(self) -> frozenset[str]:
        return self.policy.frozen_names()

    def save(self, folder: Path) -> None:
        """The same files for any number of ranks and any sharding."""
        self.team.do("save", folder)

    def load(self, folder: Path) -> None:
        self.team.do("load", folder)

    def save_here(self, folder: Path) -> None:
        """``save`` on this rank. Collective."""
        self.policy.save(folder)
        if self.critic is not None:
            self.critic.learner.save(folder / _CRITIC)

    def load_here(self, folder: Path) -> None:
        """``load`` on this rank. Collective."""
        found = self.ranks.broadcast((folder / _CRITIC).is_dir() if self.ranks.first else None)
        if found != (self.critic is not None):
            has, needs = ("a", "needs none") if found else ("no", "needs one")
            error = CheckpointError(
                f"trainer: {folder} has {has} critic, and this run's algorithm {needs}: it is of a run with another "
                "algorithm; go on with that one, or begin a new run"
            )
            self.ranks.agree(error, failed=True)
        self.policy.load(folder)
        if self.critic is not None:
            self.critic.learner.load(folder / _CRITIC)

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
            self._move("cpu")
            self.asleep, self.sleeps = True, self.sleeps + 1

    def wake_here(self) -> None:
        """``wake`` on this rank."""
        if self.asleep:
            self._move(self.device)
            self.asleep, self.wakes = False, self.wakes + 1

    def _move(self, device: str) -> None:
        if self.device == "cpu":
            return
        for learner in self._learners.values():
            learner.move(device)
        torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        """Bytes on this rank's device: ``weights``, ``masters``, ``gradients``, ``optimizer``, critic included."""
        found = dict.fromkeys(("weights", "masters", "gradients", "optimizer"), 0)
        for learner in self._learners.values():
            for kind, tensor in learner.tensors():
                found[kind] += tensor.nbytes if tensor.device.type == self.device else 0
        return found

    def _check_awake(self) -> None:
        if self.asleep:
            raise RelaxError("trainer: it sleeps, its memory is the engine's now; wake() it before it computes")
