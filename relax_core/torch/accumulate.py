"""Adds the gradients of micro-batches: forward, loss and backward of policy and critic together.

Legend: B rows, T window width, M sampled tokens, K given ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from relax_core.errors import DataError
from relax_core.hookspecs import ForwardEvent
from relax_core.interfaces import Batch, Outputs, Row
from relax_core.run import Run
from relax_core.torch.batch import make_batch
from relax_core.torch.critic import Critic
from relax_core.torch.forward import Forward
from relax_core.torch.fsdp import Shards
from relax_core.torch.layout import Piece
from relax_core.torch.pieces import Pieces
from relax_core.torch.step_state import StepState

VALUES = frozenset({"values"})


class Accumulator:
    """Of one rank. Where parameters are divided over ranks, all run equally many micro-batches."""

    def __init__(self, run: Run, compute: Forward, critic: Critic | None, pieces: Pieces) -> None:
        self.run, self.compute, self.critic, self.pieces = run, compute, critic, pieces
        found = (compute.shards, None if critic is None else critic.shards)
        self._shards: list[Shards] = [shards for shards in found if shards is not None]

    def add(self, state: StepState, rows: Sequence[Row]) -> None:
        """Add the gradient of one micro-batch's summed loss."""
        sampled, pieces = self.pieces.of(_trained(rows))
        if sampled:
            self._add(state, sampled, pieces)

    def count(self, rows: Sequence[Row]) -> int:
        """How many micro-batches ``add_share`` makes of these rows."""
        return sum(1 for _ in self.pieces.micro_batches(_trained(rows)))

    def add_share(self, state: StepState, rows: Sequence[Row], forwards: int) -> None:
        """Add the gradient of a rank's share of a micro-batch, in as many of its own as its budget asks for.

        ``forwards``: the most that a rank makes. An error is kept in the state until the update, where ranks meet.
        """
        end = [shards.calls + forwards for shards in self._shards]
        try:
            if state.error is None:
                for sampled, pieces in self.pieces.micro_batches(_trained(rows)):
                    self._add(state, sampled, pieces)
        except Exception as error:
            state.error = error
        while any(shards.calls < last for shards, last in zip(self._shards, end, strict=True)):
            self._idle()

    def _add(self, state: StepState, rows: Sequence[Row], pieces: Sequence[Piece]) -> None:
        stack, algorithm = self.run.stack, state.algorithm
        batch = make_batch(state.number, rows, pieces, self.compute.device)
        batch = stack.pipe("before_forward", self.run, batch, ForwardEvent(state.number, batch))
        with self._computed(pieces, batch, algorithm.outputs) as (computed, tokens):
            try:
                outputs = stack.pipe("after_forward", self.run, computed, ForwardEvent(state.number, batch))
                loss = algorithm.loss(batch, outputs)
            except Exception:
                self._backward(torch.zeros(()), computed, counts=False)
                raise
            self._backward(loss.total, computed)
        state.losses.append(loss.total.detach())
        state.computed += tokens
        state.note(rows, batch, loss, outputs)
        old_BT = self._old_policy(state, batch, outputs)
        if old_BT is not None and state.first_time(rows):
            state.tally.mismatch(rows, batch, old_BT)

    def _backward(self, total: Tensor, outputs: Outputs, counts: bool = True) -> None:
        counts = counts and total.requires_grad
        for shards, found in zip(self._shards, self._anchors(outputs), strict=False):
            total = total.to(found.device) + shards.anchored([found], counts)
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]

    def _anchors(self, outputs: Outputs) -> list[Tensor]:
        """For each of the shards what was computed with them."""
        if not self._shards:
            return []
        values_BT = outputs.values_BT
        return [outputs.logprobs_BT, *([] if values_BT is None or len(self._shards) == 1 else [values_BT])]

    def _idle(self) -> None:
        """Take part in a forward and backward pass of the others, without rows."""
        pieces = [self.compute.least()]
        with self.compute.run(pieces, frozenset({"logprobs"})) as made:
            if self.critic is None:
                self._backward(torch.zeros(()), made.outputs, counts=False)
                return
            with self.critic.run(pieces) as values_BT:
                self._backward(torch.zeros(()), replace(made.outputs, values_BT=values_BT), counts=False)

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

    def _old_policy(self, state: StepState, batch: Batch, outputs: Outputs) -> Tensor | None:
        """Log-probs (B, T) of the policy at the start of the step, where they are known.

        Until it moves it is the policy itself. Afterwards the batch has them, unless ``old: engine`` put the engine's
        own there.
        """
        if not state.moved:
            return outputs.logprobs_BT.detach()
        return None if self.run.config.old == "engine" else batch.old_logprobs_BT


def _trained(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.columns["weight"] != 0]


def _given_ids(batch: Batch, pieces: Sequence[Piece]) -> Tensor:
    """The token ids (M, K) at which the output ``topk_logprobs`` is asked for, rows in order."""
    ids_BTK = batch.columns.get("topk_ids")
    if ids_BTK is None:
        raise DataError(
            "trainer: the output 'topk_logprobs' needs the column 'topk_ids' (sampled, K), which the step's rows lack: "
            "name it in the algorithm's needs"
        )
    return torch.cat([ids_BTK[i, piece.sampled - piece.start] for i, piece in enumerate(pieces)])
