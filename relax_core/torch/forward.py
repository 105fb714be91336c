"""Log-probs and what else is asked for of the sampled tokens of a micro-batch, with gradient or without.

Legend: B rows, T window width, N computed tokens, M sampled tokens, H hidden size, K given ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from relax_core.errors import ConfigError
from relax_core.interfaces import ModelAdapter, Outputs
from relax_core.torch.attention import DeviceLanes, LaneAttention, supports_lanes
from relax_core.torch.fsdp import Shards
from relax_core.torch.layout import Kind, Layout, Piece, lay_out
from relax_core.torch.logprobs import Asked, Statistics, limits_of, statistics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class States:
    """Of each sampled token of a micro-batch: the final hidden state that predicts it, and its place on the grid."""

    hidden_MH: Tensor
    target_M: Tensor
    """int64: the sampled tokens."""
    cell_M: Tensor
    """int64: where they are on the window grid (B, T), flattened."""
    layout: Layout

    def on_grid(self, values_M: Tensor) -> Tensor:
        """Values of the sampled tokens (M, ...) on the window grid (B, T, ...), 0 elsewhere."""
        rows, width = self.layout.grid
        cell_M = self.layout.cell_M
        if len(cell_M) == rows * width and (cell_M[1:] > cell_M[:-1]).all():  # every cell in order: no copy
            return values_M.view(rows, width, *values_M.shape[1:])
        flat = values_M.new_zeros(rows * width, *values_M.shape[1:])
        return flat.index_copy_(0, self.cell_M, values_M).view(rows, width, *values_M.shape[1:])


@dataclass(frozen=True, slots=True)
class Computed:
    """On the window grid of the rows, 0 where no token was sampled; float32, and ``mask_BT`` bool."""

    mask_BT: Tensor
    outputs: Outputs
    layout: Layout


class Forward:
    """Runs layouts through a model of its own. ``kind`` is what the model supports of what was asked for.

    ``shards``: where the model's parameters are divided over ranks; then every forward is collective.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        adapter: ModelAdapter,
        kind: Kind,
        temperature: float,
        shards: Shards | None = None,
    ) -> None:
        self.model, self.adapter, self.temperature, self.shards = model, adapter, temperature, shards
        self.kind: Kind = kind if adapter.shares_prefix and supports_lanes(model) else "padded"
        self.device = next(model.parameters()).device
        self._attention = LaneAttention(model) if self.kind != "padded" else None
        self._banned = torch.tensor(adapter.banned_token_ids, dtype=torch.long, device=self.device)
        self._limits = limits_of(self.device)

    @contextmanager
    def run(
        self, pieces: Sequence[Piece], outputs: frozenset[str], topk_ids_MK: Tensor | None = None
    ) -> Iterator[Computed]:
        """The outputs of a micro-batch, with gradient where those are on. A backward pass belongs inside the block.

        ``topk_ids_MK``: for the output ``topk_logprobs``, int64, the ids of each sampled token, rows in order.
        """
        ids_MK = topk_ids_MK if "topk_logprobs" in outputs else None

        def found_of(states: States) -> Statistics:
            return self._statistics(states.hidden_MH, states.target_M, outputs, ids_MK)

        with self._run(pieces, found_of) as (states, found):
            mask_BT = torch.zeros(states.layout.grid, dtype=torch.bool, device=self.device)
            mask_BT.view(-1)[states.cell_M] = True
            further = [None if values_M is None else states.on_grid(values_M) for values_M in found[1:]]
            logprobs_BT = states.on_grid(found.logprobs_M)
            made = Outputs(
                logprobs_BT, entropy_BT=further[0], topk_logprobs_BTK=further[1], full_logprobs_BTV=further[2]
            )
            yield Computed(mask_BT, made, states.layout)

    @contextmanager
    def states(self, pieces: Sequence[Piece]) -> Iterator[States]:
        """Hidden states of a micro-batch, with gradient where that is on. A backward pass belongs inside the block.

        The head may be used there too.
        """
        with self._run(pieces, lambda states: states.hidden_MH) as (states, _):
            yield states

    @contextmanager
    def _run(self, pieces: Sequence[Piece], then: Callable[[States], T]) -> Iterator[tuple[States, T]]:
        """The hidden states, and what ``then`` makes of them with the model's head, all tensors."""
        layout = lay_out(pieces, self.kind)

        def call() -> tuple[Tensor, tuple[Tensor, Tensor], T]:
            hidden_NH = self._hidden(inputs)
            source_M, cell_M, target_M = (
                torch.from_numpy(x).to(self.device) for x in (layout.source_M, layout.cell_M, layout.target_M)
            )
            states = States(hidden_NH.index_select(0, source_M), target_M, cell_M, layout)
            return states.hidden_MH, (target_M, cell_M), then(states)

        try:
            inputs = self._inputs(layout)
            if self.shards is None:
                hidden_MH, (target_M, cell_M), made = call()
            else:
                hidden_MH, (target_M, cell_M), made = self.shards.run(call)
            yield States(hidden_MH, target_M, cell_M, layout), made
        finally:
            if self.shards is not None:
                self.shards.reshard()
            if self._attention is not None:
                self._attention.lanes = None

    @contextmanager
    def evenly(self, forwards: int) -> Iterator[None]:
        """Forwards without gradient; at the block's end there are so many, as on every rank, even after an error.

        It takes effect where forwards are collective.
        """
        end = 0 if self.shards is None else self.shards.calls + forwards
        try:
            yield
        finally:
            while self.shards is not None and self.shards.calls < end:
                with torch.no_grad(), self.states([self.least()]):
                    pass

    def least(self) -> Piece:
        """The smallest thing to compute: one sampled token."""
        token = min(self.adapter.stop_ids)
        return Piece(np.array([token, token], np.int32), np.array([1]), (), None, start=1, last=1, prompt=())

    def _inputs(self, layout: Layout) -> dict[str, Any]:
        """Of the model, on its device; sets the lanes in which it attends."""
        inputs = self.adapter.forward_inputs(layout.segments, layout.width)
        if layout.lanes is None:
            lengths = torch.tensor([len(s.ids) for s in layout.segments])
            inputs["attention_mask"] = (torch.arange(layout.width) < lengths[:, None]).long()
        elif self._attention is not None:
            self._attention.lanes = DeviceLanes(layout.lanes, self.device)
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def _hidden(self, inputs: Mapping[str, Any]) -> Tensor:
        """Hidden states (N, H) after the final norm, of all rows one after the other."""
        hidden = self.adapter.backbone(self.model, **inputs, use_cache=False)
        if self._attention is not None and not self._attention.calls:
            raise ConfigError(
                f"trainer.layout: {type(self.model).__name__} does not attend through transformers' attention "
                "interface, which the layouts shared and packed need; set trainer.layout to 'padded'"
            )
        return hidden.flatten(0, 1)

    def _statistics(
        self, hidden_MH: Tensor, target_M: Tensor, outputs: frozenset[str], ids_MK: Tensor | None
    ) -> Statistics:
        """Of the distribution that the engine samples from: tempered, without banned tokens."""
        asked = Asked(self.temperature, self._banned, "entropy" in outputs, "full_logprobs" in outputs)
        vocab, limits = self.adapter.vocab_size, self._limits
        return statistics(partial(self.adapter.head, self.model), hidden_MH, target_M, vocab, asked, ids_MK, limits)
