"""Adds the gradients of micro-batches: forward, loss and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax_core.hookspecs import ForwardEvent
from relax_core.interfaces import Row
from relax_core.run import Run
from relax_core.torch.batch import make_batch
from relax_core.torch.layout import Piece
from relax_core.torch.pieces import Pieces
from relax_core.torch.step_state import StepState
from relax_core.torch.trainee import Trainee


class Accumulator:
    """Of one rank. Where parameters are divided over ranks, all run equally many micro-batches."""

    def __init__(self, run: Run, trainee: Trainee[Any], pieces: Pieces) -> None:
        self.run, self.trainee, self.pieces = run, trainee, pieces
        self._shards = trainee.compute.shards

    def add(self, state: StepState, rows: Sequence[Row]) -> None:
        """Add the gradient of a micro-batch's summed loss, in as many parts as the budget asks for.

        The plan may be cut for another trainer, with more ranks.
        """
        for sampled, pieces in self.pieces.micro_batches(_trained(rows)):
            self._add(state, sampled, pieces)

    def count(self, rows: Sequence[Row]) -> int:
        """How many micro-batches ``add`` makes of these rows."""
        return sum(1 for _ in self.pieces.micro_batches(_trained(rows)))

    def add_share(self, state: StepState, rows: Sequence[Row], forwards: int) -> None:
        """``add`` of a rank's share. ``forwards``: the most that a rank makes.

        An error is kept in the state until the update, where ranks meet.
        """
        end = 0 if self._shards is None else self._shards.calls + forwards
        try:
            if state.error is None:
                self.add(state, rows)
        except Exception as error:
            state.error = error
        while self._shards is not None and self._shards.calls < end:
            with self.trainee.idle() as anchor:
                self._backward(torch.zeros(()), anchor, counts=False)

    def _add(self, state: StepState, rows: Sequence[Row], pieces: Sequence[Piece]) -> None:
        stack, trainee = self.run.stack, self.trainee
        batch = make_batch(state.number, rows, pieces, trainee.compute.device)
        batch = stack.pipe("before_forward", self.run, batch, ForwardEvent(state.number, batch, trainee.name))
        with trainee.run(pieces, batch, state.algorithm.outputs) as made:
            try:
                outputs = trainee.hooked(state, batch, made.outputs)
                loss = trainee.loss(state, batch, outputs)
            except Exception:
                self._backward(torch.zeros(()), made.anchor, counts=False)
                raise
            self._backward(loss.total, made.anchor)
        state.losses.append(loss.total.detach())
        state.computed += made.tokens
        trainee.note(state, rows, batch, outputs, loss)

    def _backward(self, total: Tensor, anchor: Tensor, counts: bool = True) -> None:
        """``anchor``: computed with the shards, if there are any."""
        if self._shards is not None:
            counts = counts and total.requires_grad
            total = total.to(anchor.device) + self._shards.anchored([anchor], counts)
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]


def _trained(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.columns["weight"] != 0]
