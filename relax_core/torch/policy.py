"""The policy as a trainer trains it: log-probs and what else the algorithm asks for, its loss, and what is told of it.

Legend: B rows, T window width, M sampled tokens, K given ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from relax_core.errors import DataError
from relax_core.hookspecs import ForwardEvent
from relax_core.interfaces import VALUES, Batch, Columns, Loss, ModelAdapter, Outputs, Row
from relax_core.run import Run
from relax_core.torch.annotate import PER_LINE, PER_TOKEN, Annotator
from relax_core.torch.config import TrainerConfig
from relax_core.torch.layout import Piece
from relax_core.torch.learner import Learner
from relax_core.torch.ranks import Ranks
from relax_core.torch.step_state import StepState
from relax_core.torch.trained import check_frozen, load_divided
from relax_core.torch.trainee import Made
from relax_core.types import LearnerName


class Policy:
    """A ``Trainee`` whose loss sees ``Outputs``."""

    name: ClassVar[LearnerName] = "policy"
    prefix: ClassVar[str] = ""
    outputs: ClassVar[frozenset[str]] = PER_TOKEN | PER_LINE

    def __init__(self, config: TrainerConfig, run: Run, adapter: ModelAdapter, budget: int, ranks: Ranks) -> None:
        self.run_ = run
        self.model, shards = load_divided(config, adapter, ranks)
        check_frozen(config, self.model)
        self.learner = Learner(self.model, config, run.config.steps, "trainer", ranks, shards)
        temperature = run.config.sampling.temperature
        self.annotator = Annotator(self.model, adapter, config.layout, temperature, budget, shards)
        self.compute, self.pieces = self.annotator.compute, self.annotator.pieces

    @contextmanager
    def run(self, pieces: Sequence[Piece], batch: Batch, asked: frozenset[str]) -> Iterator[Made[Outputs]]:
        ids_MK = _given_ids(batch, pieces) if "topk_logprobs" in asked else None
        with self.compute.run(pieces, asked - VALUES, ids_MK) as made:
            yield Made(made.outputs, made.outputs.logprobs_BT, made.layout.tokens)

    @contextmanager
    def idle(self) -> Iterator[Tensor]:
        with self.compute.run([self.compute.least()], frozenset({"logprobs"})) as made:
            yield made.outputs.logprobs_BT

    def hooked(self, state: StepState, batch: Batch, outputs: Outputs) -> Outputs:
        event = ForwardEvent(state.number, batch, self.name)
        found: Outputs = self.run_.stack.pipe("after_forward", self.run_, outputs, event)
        return found

    def loss(self, state: StepState, batch: Batch, outputs: Outputs) -> Loss:
        return state.algorithm.loss(batch, outputs)

    def note(self, state: StepState, rows: Sequence[Row], batch: Batch, outputs: Outputs, loss: Loss) -> None:
        state.tally.add(loss.metrics)
        state.tally.clipped(rows, batch, loss.clipped_BT)
        if outputs.entropy_BT is not None and "entropy" not in loss.metrics:
            count = torch.tensor(sum(int(row.columns["mask"].sum()) for row in rows))
            state.tally.add({"entropy": (outputs.entropy_BT.detach().sum(), count)})
        old_BT = self._at_the_start(state, batch, outputs)
        if old_BT is not None and state.first_time(rows):
            state.tally.mismatch(rows, batch, old_BT)

    def _at_the_start(self, state: StepState, batch: Batch, outputs: Outputs) -> Tensor | None:
        """Log-probs (B, T) of the policy at the start of the step, where they are known.

        Until it moves it is the policy itself. Afterwards the batch has them, unless ``old: engine`` put the engine's
        own there.
        """
        if not any(state.moved):
            return outputs.logprobs_BT.detach()
        return None if self.run_.config.old == "engine" else batch.old_logprobs_BT

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        return await self.annotator.forward(rows, outputs)

    def forward_now(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        return self.annotator.forward_now(rows, outputs)


def _given_ids(batch: Batch, pieces: Sequence[Piece]) -> Tensor:
    """The token ids (M, K) at which the output ``topk_logprobs`` is asked for, rows in order."""
    ids_BTK = batch.columns.get("topk_ids")
    if ids_BTK is None:
        raise DataError(
            "trainer: the output 'topk_logprobs' needs the column 'topk_ids' (sampled, K), which the step's rows lack: "
            "name it in the algorithm's needs"
        )
    return torch.cat([ids_BTK[i, piece.sampled - piece.start] for i, piece in enumerate(pieces)])
