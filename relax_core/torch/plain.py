"""What a model in memory says of given tokens, by the plainest forward there is: the truth that others are measured by.

Legend: T tokens, N new ones, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from relax_core.chat_state import advanced
from relax_core.interfaces import ModelAdapter, Segment
from relax_core.types import Encoded


def logprob_table(
    adapter: ModelAdapter, model: torch.nn.Module, prompt: Encoded, ids: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probs (N + 1, V) of every id at each place of ``ids`` after ``prompt``, and at the next place.

    One forward over the whole row, without cache, batch or padding; float64 from the logits on. Banned ids have -inf.
    """
    row = Segment([*prompt.ids, *ids], prompt.media, advanced(prompt.positions, len(ids)))
    with torch.no_grad():
        device = next(model.parameters()).device
        inputs = adapter.forward_inputs([row], len(row.ids))
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        # The mask keeps transformers from taking positions that stand still for borders of packed rows.
        whole = torch.ones(1, len(row.ids), dtype=torch.long, device=device)
        hidden_TH = adapter.backbone(model, **inputs, attention_mask=whole, use_cache=False)[0]
        logits_NV = adapter.head(model, hidden_TH[len(prompt.ids) - 1 :])[:, : adapter.vocab_size]
        logits_NV = logits_NV.double() / (temperature or 1.0)
        logits_NV[:, list(adapter.banned_token_ids)] = -torch.inf
        return logits_NV.log_softmax(-1)


def full_logprobs(
    adapter: ModelAdapter, model: torch.nn.Module, prompt: Encoded, ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of ``ids`` after ``prompt``; see ``logprob_table``."""
    table_NV = logprob_table(adapter, model, prompt, ids, temperature)[:-1]
    chosen_N = table_NV.gather(-1, torch.tensor(list(ids), device=table_NV.device)[:, None])[:, 0]
    return [float(x) for x in chosen_N]


def add_noise(model: torch.nn.Module, seed: int, scale: float) -> None:
    """Other weights, in place: to every matrix noise of ``scale`` / sqrt(inputs), so that each layer's output changes
    by about ``scale`` whatever its size; the same for the same seed, on any device and in any order of devices."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).mul_(scale / math.sqrt(parameter.shape[-1]))
                parameter.add_(noise.to(parameter.device, parameter.dtype))


class ModelTruth:
    """A model in memory, for the probe (see probe.py)."""

    who = "the model in memory"
    temperature = None

    def __init__(self, adapter: ModelAdapter, model: torch.nn.Module) -> None:
        self.adapter, self.model = adapter, model

    async def __call__(
        self, prompt: Encoded, replies: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        return [full_logprobs(self.adapter, self.model, prompt, ids, temperature) for ids in replies]
