"""Forwards and gradients of any adapter's model, for tests. Shape legend: B rows, W width, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_core.interfaces import ModelAdapter, Segment
from relax_core.types import Encoded

if TYPE_CHECKING:
    import torch


def segment(row: Encoded) -> Segment:
    """A whole row."""
    return Segment(row.ids, row.media, row.positions)


def logits(adapter: ModelAdapter, model: torch.nn.Module, segments: Sequence[Segment], **inputs: Any) -> torch.Tensor:
    """Logits (B, W, V) of right-padded segments; ``inputs`` (mask, cache ...) go to the backbone."""
    width = max(len(s.ids) for s in segments)
    return adapter.head(model, adapter.backbone(model, **adapter.forward_inputs(segments, width), **inputs))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients, by parameter; they are cleared."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal_gradients(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """To 1e-5 of each one's largest entry.

    Left out is the bias of attention keys, which has no gradient but noise: it adds the same to all scores of a query.
    """
    assert got.keys() == want.keys()
    errors = {n: float((got[n] - g).abs().max() / g.abs().max()) for n, g in want.items() if "k_proj.bias" not in n}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 1e-5, f"{worst}: {errors[worst]:.1e}"
