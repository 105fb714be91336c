"""The embedded trainer: gradients of micro-batches, summed, divided once, clipped, and given to AdamW."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from relax_core.errors import CheckpointError, ConfigError, DataError, RelaxError
from relax_core.hookspecs import ForwardEvent, OptimizerEvent
from relax_core.interfaces import Algorithm, Batch, Columns, Cut, Loss, Outputs, Row, StepResult, Trainer
from relax_core.setup import TrainerSetup
from relax_core.torch.annotate import PER_LINE, PER_TOKEN, Annotator, check_outputs
from relax_core.torch.batch import make_batch
from relax_core.torch.config import TrainerConfig
from relax_core.torch.critic import Critic
from relax_core.torch.layout import Piece
from relax_core.torch.learner import Learner
from relax_core.torch.optim import named_tensors
from relax_core.torch.pieces import Pieces
from relax_core.torch.tally import Tally
from relax_core.torch.trained import device_of, load_trained

VALUES = frozenset({"values"})
OUTPUTS = PER_TOKEN | PER_LINE | VALUES
_BUDGETS = {"cpu": 4096}
_CRITIC = "critic"


class TorchTrainer(Trainer):
    """Trains its own copy of the model, on one device; and a critic, where the algorithm asks for values.

    Dropout is off, since engine and trainer must agree on the policy. On a CPU equal cuts give equal bits.
    """

    Config = TrainerConfig
    config: TrainerConfig

    def __init__(self, config: TrainerConfig, setup: TrainerSetup) -> None:
        super().__init__(config)
        self.adapter, self.run = setup.adapter, setup.run
        check_outputs(setup.outputs, OUTPUTS, f"algorithm {self.run.config.algorithm.id}")
        if problems := [f"trainer.{line}" for line in config.unused(setup.outputs)]:
            raise ConfigError(*problems)
        device, steps = device_of(config), self.run.config.steps
        if device == "cpu" or config.threads:
            torch.set_num_threads(config.threads or 1)
        budget = config.tokens_per_micro_batch or _BUDGETS.get(device, 16384)
        self.model = load_trained(config, self.adapter)
        self.policy = Learner(self.model, config, steps, "trainer")
        self.annotator = Annotator(
            self.model, self.adapter, config.layout, self.run.config.sampling.temperature, budget
        )
        self.compute = self.annotator.compute
        self.critic = Critic(config, self.adapter, steps, budget) if setup.outputs & VALUES else None
        self._learners = {"": self.policy} | ({} if self.critic is None else {"critic_": self.critic.learner})
        """By the beginning of their metrics' names."""
        self._pieces = Pieces(self.compute.kind, budget)

    # --- micro-batches ------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        return self._pieces.budget

    def cost(self, rows: Sequence[Row]) -> int:
        return self._pieces.cost(rows)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """``values`` of the critic, and what ``Annotator.forward`` gives."""
        self._check(outputs, "forward")
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

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        """See ``Trainer.step``; steps count from 0. Yields to the event loop after every micro-batch.

        An update is skipped, with weights and optimizer as they were, when nothing of it is trained, or when its
        gradient is exactly zero or not finite. Policy and critic are skipped each for itself: an update counts when one
        of them moved. Raises RelaxError after ``max_nonfinite`` gradients of one that are not finite in a row.
        """
        self._check(algorithm.outputs, f"algorithm {type(algorithm).__name__}")
        state = _Step(step, algorithm)
        for learner in self._learners.values():
            learner.optimizer.clear()
        self._pieces.clear()
        async for cut in plan:
            state.cuts.append(([row.id for row in cut.rows], cut.last))
            self._accumulate(state, cut.rows)
            if cut.last:
                async with self.critic.still if self.critic is not None else nullcontext():
                    self._update(state)
            await asyncio.sleep(0)
        if state.open:
            raise RelaxError(f"trainer: the plan of step {step} ended within an update; end it with a cut of last=True")
        return StepResult(self._metrics(state), state.updates, state.skipped, state.cuts)

    def _accumulate(self, state: _Step, rows: Sequence[Row]) -> None:
        """Add the gradient of a micro-batch's summed loss."""
        state.open = True
        state.units += math.fsum(float(row.columns["units"]) for row in rows)
        rows, pieces = self._pieces.of([row for row in rows if row.columns["weight"] != 0])
        if not rows:
            return
        stack, algorithm = self.run.stack, state.algorithm
        batch = make_batch(state.number, rows, pieces, self.compute.device)
        batch = stack.pipe("before_forward", self.run, batch, ForwardEvent(state.number, batch))
        with self._computed(pieces, batch, algorithm.outputs) as (outputs, tokens):
            outputs = stack.pipe("after_forward", self.run, outputs, ForwardEvent(state.number, batch))
            loss = algorithm.loss(batch, outputs)
            if loss.total.requires_grad:
                loss.total.backward()  # type: ignore[no-untyped-call]
        state.losses.append(loss.total.detach())
        state.computed += tokens
        state.note(rows, batch, loss, outputs)
        old_BT = self._old_policy(state, batch, outputs)
        if old_BT is not None and state.first_time(rows):
            state.tally.mismatch(rows, batch, old_BT)

    @contextmanager
    def _computed(self, pieces: Sequence[Piece], batch: Batch, names: frozenset[str]) -> Iterator[tuple[Outputs, int]]:
        """The outputs of a micro-batch with gradient, and how many tokens of it the policy's model computes."""
        ids_MK = _given_ids(batch, pieces) if "topk_logprobs" in names else None
        with self.compute.run(pieces, names - VALUES, ids_MK) as made:
            if self.critic is None or not names & VALUES:
                yield made.outputs, made.layout.tokens
                return
            with self.critic.run(pieces) as values_BT:
                yield replace(made.outputs, values_BT=values_BT), made.layout.tokens

    def _old_policy(self, state: _Step, batch: Batch, outputs: Outputs) -> Tensor | None:
        """Log-probs (B, T) of the policy at the start of the step, where they are known.

        Until it moves it is the policy itself. Afterwards the batch has them, unless ``old: engine`` put the engine's
        own there.
        """
        if not state.moved:
            return outputs.logprobs_BT.detach()
        return None if self.run.config.old == "engine" else batch.old_logprobs_BT

    def _update(self, state: _Step) -> None:
        """End an optimizer update: divide, clip, step; or skip it."""
        units, losses = state.close()
        norms = {name: x.optimizer.reduce(units) if units else 0.0 for name, x in self._learners.items()}
        if units and losses:
            state.tally.add({"loss": (torch.stack(losses).double().sum() / units, torch.ones(()))})
            for name, norm in norms.items():
                state.tally.add({f"{name}grad_norm": (torch.tensor(norm, dtype=torch.float64), torch.ones(()))})
        state.nonfinite += not all(map(math.isfinite, norms.values()))
        moving = [x for name, x in self._learners.items() if x.may_move(state.number, norms[name])]
        if not moving:
            state.skipped += 1
            return
        event = OptimizerEvent(state.number, state.seen_updates - 1, norms[""] if self.policy in moving else 0.0)
        self.run.stack.hook.before_optimizer_step(run=self.run, event=event)
        for learner in moving:
            learner.optimizer.update(state.number)
        state.updates += 1
        state.moved |= self.policy in moving

    def _metrics(self, state: _Step) -> dict[str, float]:
        return state.tally.means() | {
            **{f"{name}lr": learner.learning_rate(state.number) for name, learner in self._learners.items()},
            "computed_tokens": state.computed,
            "nonfinite": state.nonfinite,
        }

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from named_tensors(self.model)

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        if self.critic is not None:
            self.critic.learner.save(folder / _CRITIC)

    def load(self, folder: Path) -> None:
        found = (folder / _CRITIC).is_dir()
        if found != (self.critic is not None):
            has, needs = ("a", "needs none") if found else ("no", "needs one")
            raise CheckpointError(
                f"trainer: {folder} has {has} critic, and this run's algorithm {needs}: it is of a run with another "
                "algorithm; go on with that one, or begin a new run"
            )
        self.policy.load(folder)
        if self.critic is not None:
            self.critic.learner.load(folder / _CRITIC)


@dataclass(slots=True)
class _Step:
    """What one training step has come to so far."""

    number: int
    algorithm: Algorithm
    tally: Tally = field(default_factory=Tally)
    cuts: list[tuple[list[str], bool]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    """Of the micro-batches of the update that is open."""
    units: float = 0.0
    open: bool = False
    seen_updates: int = 0
    updates: int = 0
    skipped: int = 0
    nonfinite: int = 0
    computed: int = 0
    moved: bool = False
    """Whether the policy is no longer that of the step's start."""
    compared: set[str] = field(default_factory=set)

    def close(self) -> tuple[float, list[Tensor]]:
        """End the open update; its units and its micro-batches' losses."""
        units, losses = self.units, self.losses
        self.units, self.losses, self.open = 0.0, [], False
        self.seen_updates += 1
        return units, losses

    def note(self, rows: Sequence[Row], batch: Batch, loss: Loss, outputs: Outputs) -> None:
        """Tally what a micro-batch's loss tells."""
        self.tally.add(loss.metrics)
        self.tally.clipped(rows, batch, loss.clipped_BT)
        if outputs.entropy_BT is not None and "entropy" not in loss.metrics:
            count = torch.tensor(sum(int(row.columns["mask"].sum()) for row in rows))
            self.tally.add({"entropy": (outputs.entropy_BT.detach().sum(), count)})

    def first_time(self, rows: Sequence[Row]) -> bool:
        """Whether these rows are trained for the first time in this step (epochs repeat them)."""
        ids = {row.id for row in rows}
        new = not ids & self.compared
        self.compared |= ids
        return new


def _given_ids(batch: Batch, pieces: Sequence[Piece]) -> Tensor:
    """The token ids (M, K) at which the output ``topk_logprobs`` is asked for, rows in order."""
    ids_BTK = batch.columns.get("topk_ids")
    if ids_BTK is None:
        raise DataError(
            "trainer: the output 'topk_logprobs' needs the column 'topk_ids' (sampled, K), which the step's rows lack: "
            "name it in the algorithm's needs"
        )
    return torch.cat([ids_BTK[i, piece.sampled - piece.start] for i, piece in enumerate(pieces)])
