"""What a model says of rows that are there, as columns of these rows, without gradient.

Legend: T tokens of a row, M sampled tokens of a micro-batch, H hidden size, K most probable tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_core.errors import ConfigError
from relax_core.interfaces import Columns, ModelAdapter, Outputs, Row
from relax_core.torch.batch import line_count, lines, on_row, wide_column
from relax_core.torch.forward import Forward
from relax_core.torch.fsdp import Shards
from relax_core.torch.layout import Kind, Piece
from relax_core.torch.logprobs import Asked, statistics
from relax_core.torch.pieces import Pieces

PER_TOKEN = frozenset({"logprobs", "entropy"})
"""Outputs with a number for each token of a row."""
PER_LINE = frozenset({"topk_logprobs", "full_logprobs"})
"""Outputs with a line of numbers for each sampled token."""
_TOP_CHUNK = {"cpu": 1 << 23}
"""Elements of logits (M, V) that exist at once while the most probable tokens are looked for."""

Found = dict[str, dict[str, Any]]
"""Columns by the row's id and their name."""


class Annotator:
    """Runs rows through a model of its own, in micro-batches cut by the plan's packer.

    ``compute`` is the forward itself: who also trains the model uses it too. ``temperature`` is that of the softmax;
    banned tokens take no part in it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        adapter: ModelAdapter,
        layout: Kind,
        temperature: float,
        budget: int,
        shards: Shards | None = None,
    ) -> None:
        self.compute = Forward(model, adapter, layout, temperature, shards)
        self.pieces = Pieces(self.compute.kind, budget)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str], top_k: int | None = None) -> list[Columns]:
        """The columns of each row. Yields to the event loop after every micro-batch.

        ``logprobs`` and ``entropy``: float32 (T,), 0 where mask is 0. ``full_logprobs``: float32 (sampled, V), one line
        for each sampled token. ``topk_logprobs``: float32 (sampled, K), at the ids in the row's column ``topk_ids``.
        ``topk``: the ``top_k`` most probable tokens in falling order, as ``topk_ids``, int32 (sampled, K), and
        ``topk_logprobs``. Rows without sampled tokens get zeros and no lines. Raises ConfigError for another output.
        """
        found: Found = {}
        for _ in self._found(rows, outputs, top_k, found):
            await asyncio.sleep(0)
        return [found.get(row.id) or self._nothing(row, outputs, top_k) for row in rows]

    def forward_now(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """``forward`` at once."""
        found: Found = {}
        for _ in self._found(rows, outputs, None, found):
            pass
        return [found.get(row.id) or self._nothing(row, outputs, None) for row in rows]

    def _found(self, rows: Sequence[Row], outputs: frozenset[str], top_k: int | None, found: Found) -> Iterator[None]:
        check_outputs(outputs, PER_TOKEN | PER_LINE | {"topk"}, "forward")
        self._check_top(outputs, top_k)

        def columns(sampled: Sequence[Row], pieces: Sequence[Piece]) -> dict[str, list[Any]]:
            made = self._stated(sampled, pieces, outputs - {"topk"})
            return made | (self._top(pieces, top_k) if "topk" in outputs and top_k else {})

        return in_micro_batches(rows, self.pieces, columns, found)

    def _check_top(self, outputs: frozenset[str], top_k: int | None) -> None:
        if "topk" not in outputs:
            return
        if "topk_logprobs" in outputs:
            raise ConfigError("forward: 'topk' and 'topk_logprobs' make the same column; ask for one of them")
        if top_k is None or not 0 < top_k <= self.compute.adapter.vocab_size:
            raise ConfigError(
                f"forward: the output 'topk' needs a top_k from 1 to {self.compute.adapter.vocab_size}, the size of "
                f"the vocabulary; found {top_k}"
            )

    def _stated(
        self, rows: Sequence[Row], pieces: Sequence[Piece], outputs: frozenset[str]
    ) -> dict[str, list[NDArray[Any]]]:
        """What ``Forward.run`` computes, by name, one column a row."""
        if not outputs:
            return {}
        ids_MK = None
        if "topk_logprobs" in outputs:
            ids_MK = torch.from_numpy(np.concatenate(wide_column(rows, "topk_ids"))).to(self.compute.device)
        with self.compute.run(pieces, outputs, ids_MK) as made:
            return {name: _columns(_grid(made.outputs, name), pieces, made.mask_BT, name) for name in sorted(outputs)}

    def _top(self, pieces: Sequence[Piece], top_k: int) -> dict[str, list[NDArray[Any]]]:
        """The most probable tokens, chunk by chunk: no more than a part of the log-probs exists at once."""
        compute = self.compute
        size = max(1, _TOP_CHUNK.get(compute.device.type, 1 << 27) // compute.adapter.vocab_size)
        with compute.states(pieces) as states:
            parts = zip(torch.split(states.hidden_MH, size), torch.split(states.target_M, size), strict=True)
            chunks = [self._logprobs(*part).topk(top_k, -1) for part in parts]
        logprobs_MK = torch.cat([chunk.values for chunk in chunks]).cpu().numpy()
        ids_MK = torch.cat([chunk.indices for chunk in chunks]).int().cpu().numpy()
        return {"topk_ids": lines(ids_MK, pieces), "topk_logprobs": lines(logprobs_MK, pieces)}

    def _logprobs(self, hidden_MH: Tensor, target_M: Tensor) -> Tensor:
        """Of every token of the vocabulary (M, V), as the output ``full_logprobs`` has them."""
        compute = self.compute
        banned = torch.tensor(compute.adapter.banned_token_ids, dtype=torch.long, device=compute.device)
        asked = Asked(compute.temperature, banned, full=True)
        head = partial(compute.adapter.head, compute.model)
        made = statistics(head, hidden_MH, target_M, compute.adapter.vocab_size, asked).full_logprobs_MV
        assert made is not None  # was asked for
        return made

    def _nothing(self, row: Row, outputs: frozenset[str], top_k: int | None) -> Columns:
        """The columns of a row without sampled tokens."""
        widths = {"full_logprobs": self.compute.adapter.vocab_size}
        if "topk_logprobs" in outputs:
            widths["topk_logprobs"] = line_count(row, "topk_ids")
        columns: dict[str, Any] = {
            name: np.zeros((0, widths[name]) if name in PER_LINE else len(row.columns["tokens"]), np.float32)
            for name in outputs - {"topk"}
        }
        if "topk" in outputs:
            columns["topk_ids"] = np.zeros((0, top_k or 0), np.int32)
            columns["topk_logprobs"] = np.zeros((0, top_k or 0), np.float32)
        return columns


def in_micro_batches(
    rows: Sequence[Row],
    pieces: Pieces,
    columns: Callable[[Sequence[Row], Sequence[Piece]], Mapping[str, Sequence[Any]]],
    found: Found,
) -> Iterator[None]:
    """Put into ``found``, by row id, the columns that ``columns`` gives for a micro-batch, by name one for each row.

    Runs without gradient, and pauses after every micro-batch. Rows without sampled tokens are left out; those of a
    group must lie in a line.
    """
    for sampled, parts in pieces.micro_batches(rows):
        with torch.no_grad():
            made = columns(sampled, parts)
        for name, values in made.items():
            for row, value in zip(sampled, values, strict=True):
                found.setdefault(row.id, {})[name] = value
        yield
    pieces.clear()


def check_outputs(outputs: frozenset[str], known: frozenset[str], who: str) -> None:
    """Raise ConfigError for the first output that is not known."""
    if unknown := sorted(outputs - known):
        names = ", ".join(sorted(known))
        raise ConfigError(f"{who}: asks for the output {unknown[0]!r}; known are {names}")


def _grid(outputs: Outputs, name: str) -> Tensor:
    grid: Tensor | None = {
        "logprobs": outputs.logprobs_BT,
        "entropy": outputs.entropy_BT,
        "topk_logprobs": outputs.topk_logprobs_BTK,
        "full_logprobs": outputs.full_logprobs_BTV,
    }[name]
    assert grid is not None  # was asked for
    return grid


def _columns(grid: Tensor, pieces: Sequence[Piece], mask_BT: Tensor, name: str) -> list[NDArray[Any]]:
    if name in PER_LINE:
        return lines(grid[mask_BT].cpu().numpy(), pieces)
    return [on_row(window_T, piece) for window_T, piece in zip(grid.cpu().numpy(), pieces, strict=True)]
