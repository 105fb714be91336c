"""What tests of engines share: requests, the log-probs they must report, weights to load, and a picklable builder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from relax_core.interfaces import Request, Segment
from relax_core.types import DrawKey, Encoded, Sampling

if TYPE_CHECKING:
    import torch

    from relax_core.interfaces import Engine, ModelAdapter
    from relax_core.media import MediaStore


def request(
    name: str,
    prompt: Sequence[int] | Encoded,
    new: int = 8,
    *,
    temperature: float = 1.0,
    order: tuple[int, ...] = (),
    pool: Literal["train", "eval"] = "train",
    **sampling: Any,
) -> Request:
    """A request that draws under the key of task ``name``."""
    encoded = prompt if isinstance(prompt, Encoded) else Encoded(list(prompt))
    return Request(name, DrawKey(name, 0, 0, 0), encoded, Sampling(temperature, new, **sampling), order, pool)


def full_logprobs(
    adapter: ModelAdapter, model: torch.nn.Module, prompt: Encoded, ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of ``ids`` after ``prompt`` by one forward over the whole row, without cache, batch or padding."""
    import numpy as np
    import torch

    new, positions = len(ids), prompt.positions
    if positions is not None:
        after = np.arange(new, dtype=np.int32) + positions.max() + 1
        positions = np.concatenate([positions, np.broadcast_to(after, (3, new))], axis=1).astype(np.int32)
    row = Segment([*prompt.ids, *ids], prompt.media, positions)
    with torch.no_grad():
        inputs = adapter.forward_inputs([row], len(row.ids))
        # The mask keeps transformers from taking positions that stand still for borders of packed rows.
        whole = torch.ones(1, len(row.ids), dtype=torch.long)
        hidden_TH = adapter.backbone(model, **inputs, attention_mask=whole, use_cache=False)[0]
        logits_TV = adapter.head(model, hidden_TH[-new - 1 : -1]).double() / (temperature or 1.0)
        logits_TV[:, list(adapter.banned_token_ids)] = -torch.inf
        chosen_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(list(ids))[:, None])[:, 0]
    return [float(x) for x in chosen_T]


def changed_weights(model: torch.nn.Module, seed: int, scale: float = 0.05) -> list[tuple[str, torch.Tensor]]:
    """The model's parameters with noise, under their names, as a trainer would publish them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        (name, p.detach() + scale * torch.randn(p.shape, generator=generator)) for name, p in model.named_parameters()
    ]


@dataclass(frozen=True)
class TinyBuilder:
    """Builds a TorchEngine on a TinyAdapter, here or in another process. Settings are fields of their configs."""

    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    deterministic: bool = False

    def __call__(self) -> tuple[Engine, MediaStore]:
        from relax_core.media import MediaStore
        from relax_core.setup import EngineSetup
        from relax_core.testing.tiny import tiny_adapter
        from relax_core.torch.config import EngineConfig
        from relax_core.torch.engine import TorchEngine

        media = MediaStore({}, max_bytes=1 << 20)
        adapter = tiny_adapter(media=media, **self.model)
        config = EngineConfig(device="cpu", **self.engine)
        return TorchEngine(config, EngineSetup(adapter, self.seed, self.deterministic)), media
