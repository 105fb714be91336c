"""The critic: its own copy of the model, with a linear head that gives the value of the state before each token.

Legend: B rows, T window width, M sampled tokens, H hidden size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from relax_core.interfaces import VALUES, Batch, Columns, Loss, ModelAdapter, Row
from relax_core.run import Run
from relax_core.torch.annotate import Found, in_micro_batches
from relax_core.torch.batch import on_row
from relax_core.torch.config import TrainerConfig
from relax_core.torch.forward import Forward, States
from relax_core.torch.layout import Piece
from relax_core.torch.learner import Learner
from relax_core.torch.pieces import Pieces
from relax_core.torch.ranks import Ranks
from relax_core.torch.step_state import StepState
from relax_core.torch.trained import load_divided
from relax_core.torch.trainee import Made
from relax_core.types import LearnerName


class Critic:
    """Values of states, as in PPO (arXiv:1707.06347): a ``Trainee`` whose loss sees them (B, T).

    The value of a sampled token is read from the final hidden state that predicts it, in float32. The head begins at
    zero, so that all values do. They are on the window grid, 0 where no token was sampled.
    """

    name: ClassVar[LearnerName] = "critic"
    prefix: ClassVar[str] = "critic_"
    outputs: ClassVar[frozenset[str]] = VALUES

    def __init__(self, config: TrainerConfig, run: Run, adapter: ModelAdapter, budget: int, ranks: Ranks) -> None:
        model, shards = load_divided(config, adapter, ranks, _drop_head)
        self.compute = Forward(model, adapter, config.layout, 1.0, shards)
        self._head = _zero_head(_hidden_size(self.compute), self.compute.device)
        module = torch.nn.ModuleDict({"model": model, "head": self._head})
        self.learner = Learner(module, config.for_critic(), run.config.steps, "trainer.critic", ranks, shards)
        self.pieces = Pieces(self.compute.kind, budget)

    @contextmanager
    def run(self, pieces: Sequence[Piece], batch: Batch, asked: frozenset[str]) -> Iterator[Made[Tensor]]:
        with self.compute.states(pieces) as states:
            values_BT = self._values(states)
            yield Made(values_BT, values_BT, states.layout.tokens)

    @contextmanager
    def idle(self) -> Iterator[Tensor]:
        with self.compute.states([self.compute.least()]) as states:
            yield self._values(states)

    def _values(self, states: States) -> Tensor:
        values_BT: Tensor = states.on_grid(self._head(states.hidden_MH.float())[:, 0])
        return values_BT

    def hooked(self, state: StepState, batch: Batch, outputs: Tensor) -> Tensor:
        return outputs

    def loss(self, state: StepState, batch: Batch, outputs: Tensor) -> Loss:
        return state.algorithm.value_loss(batch, outputs)

    def note(self, state: StepState, rows: Sequence[Row], batch: Batch, outputs: Tensor, loss: Loss) -> None:
        state.tally.add(loss.metrics)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """The column ``values`` of each row: float32 (T,), 0 where mask is 0."""
        found: Found = {}
        for _ in self._found(rows, found):
            await asyncio.sleep(0)
        return [found.get(row.id) or _nothing(row) for row in rows]

    def forward_now(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        found: Found = {}
        for _ in self._found(rows, found):
            pass
        return [found.get(row.id) or _nothing(row) for row in rows]

    def _found(self, rows: Sequence[Row], found: Found) -> Iterator[None]:
        def values(sampled: Sequence[Row], pieces: Sequence[Piece]) -> dict[str, list[Any]]:
            with self.compute.states(pieces) as states:
                windows = zip(self._values(states).cpu().numpy(), pieces, strict=True)
                return {"values": [on_row(window_T, piece) for window_T, piece in windows]}

        return in_micro_batches(rows, self.pieces, values, found)


def _nothing(row: Row) -> Columns:
    """Of a row without sampled tokens."""
    return {"values": np.zeros(len(row.columns["tokens"]), np.float32)}


def _hidden_size(compute: Forward) -> int:
    """Found by a forward of one token: a config's name for it depends on the architecture."""
    with torch.no_grad(), compute.states([compute.least()]) as states:
        return int(states.hidden_MH.shape[-1])


def _zero_head(size: int, device: torch.device) -> torch.nn.Linear:
    """Made without a draw from torch's global generator, which a critic must not change."""
    head = torch.nn.Linear(size, 1, bias=False, device="meta", dtype=torch.float32).to_empty(device=device)
    torch.nn.init.zeros_(head.weight)
    return head


def _drop_head(model: torch.nn.Module) -> None:
    """Free the projection to the vocabulary, which no value needs."""
    unused = getattr(model, "get_output_embeddings", lambda: None)()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is unused:
                setattr(module, name, torch.nn.Identity())
