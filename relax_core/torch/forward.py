"""Log-probs, and where asked entropies, of the sampled tokens of a micro-batch, with gradient or without.

Legend: B rows, T window width, N computed tokens, M sampled tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from relax_core.errors import ConfigError
from relax_core.interfaces import ModelAdapter
from relax_core.torch.attention import DeviceLanes, LaneAttention, supports_lanes
from relax_core.torch.layout import Kind, Layout, Piece, lay_out
from relax_core.torch.sampling import BANNED

_CHUNK = {"cpu": 1 << 23}
"""Elements of logits (M, V) that exist at once; beyond it they are made in chunks, and again in the backward pass."""


@dataclass(frozen=True, slots=True)
class Computed:
    """On the window grid of the rows, 0 where no token was sampled; float32, and ``mask_BT`` bool."""

    mask_BT: Tensor
    logprobs_BT: Tensor
    entropy_BT: Tensor | None
    layout: Layout


class Forward:
    """Runs layouts through a model of its own. ``kind`` is what the model supports of what was asked for."""

    def __init__(self, model: torch.nn.Module, adapter: ModelAdapter, kind: Kind, temperature: float) -> None:
        self.model, self.adapter, self.temperature = model, adapter, temperature
        self.kind: Kind = kind if adapter.shares_prefix and supports_lanes(model) else "padded"
        self.device = next(model.parameters()).device
        self._attention = LaneAttention(model) if self.kind != "padded" else None
        self._banned = torch.tensor(adapter.banned_token_ids, dtype=torch.long, device=self.device)

    @contextmanager
    def run(self, pieces: Sequence[Piece], entropy: bool) -> Iterator[Computed]:
        """The outputs of a micro-batch, with gradient where those are on. A backward pass belongs inside the block."""
        layout = lay_out(pieces, self.kind)
        try:
            hidden_NH = self._hidden(layout)
            source_M, cell_M, target_M = (
                torch.from_numpy(x).to(self.device) for x in (layout.source_M, layout.cell_M, layout.target_M)
            )
            logprobs_M, entropy_M = self._statistics(hidden_NH.index_select(0, source_M), target_M, entropy)
            mask_BT = torch.zeros(layout.grid, dtype=torch.bool, device=self.device)
            mask_BT.view(-1)[cell_M] = True
            entropy_BT = None if entropy_M is None else _on_grid(entropy_M, cell_M, layout.grid)
            yield Computed(mask_BT, _on_grid(logprobs_M, cell_M, layout.grid), entropy_BT, layout)
        finally:
            if self._attention is not None:
                self._attention.lanes = None

    def _hidden(self, layout: Layout) -> Tensor:
        """Hidden states (N, H) after the final norm, of all rows one after the other."""
        inputs = self.adapter.forward_inputs(layout.segments, layout.width)
        if layout.lanes is None:
            lengths = torch.tensor([len(s.ids) for s in layout.segments])
            inputs["attention_mask"] = (torch.arange(layout.width) < lengths[:, None]).long()
        elif self._attention is not None:
            self._attention.lanes = DeviceLanes(layout.lanes, self.device)
        inputs = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        hidden = self.adapter.backbone(self.model, **inputs, use_cache=False)
        if self._attention is not None and not self._attention.calls:
            raise ConfigError(
                f"trainer.layout: {type(self.model).__name__} does not attend through transformers' attention "
                "interface, which the layouts shared and packed need; set trainer.layout to 'padded'"
            )
        return hidden.flatten(0, 1)

    def _statistics(self, hidden_MH: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        size = max(1, _CHUNK.get(self.device.type, 1 << 27) // self.adapter.vocab_size)
        if len(target_M) <= size:
            return self._chunk(hidden_MH, target_M, entropy)
        logprobs, entropies = [], []
        for chunk_MH, chunk_M in zip(torch.split(hidden_MH, size), torch.split(target_M, size), strict=True):
            made = checkpoint(self._chunk, chunk_MH, chunk_M, entropy, use_reentrant=False, preserve_rng_state=False)
            logprobs.append(made[0])
            entropies.append(made[1])
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    def _chunk(self, hidden_MH: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Of the tempered distribution without banned tokens: the one that the engine samples from."""
        logits_MV = self.adapter.head(self.model, hidden_MH).float()
        if self.temperature != 1:
            logits_MV = logits_MV / self.temperature
        if len(self._banned):
            logits_MV = logits_MV.index_fill(-1, self._banned, BANNED)
        if not entropy:
            return -cross_entropy(logits_MV, target_M, reduction="none"), None
        all_MV = logits_MV.log_softmax(-1)
        return all_MV.gather(-1, target_M[:, None])[:, 0], -(all_MV.exp() * all_MV).sum(-1)


def _on_grid(values_M: Tensor, cell_M: Tensor, grid: tuple[int, int]) -> Tensor:
    flat = values_M.new_zeros(grid[0] * grid[1])
    return flat.index_copy(0, cell_M, values_M).view(grid)
