"""Takes published weights into a model's own tensors: all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_core.errors import WeightsError, nearest

Named = Sequence[tuple[str, Tensor]]
"""Tensors with their Hugging Face names."""


def check_weights(model: torch.nn.Module, weights: Named, held: frozenset[str] = frozenset()) -> None:
    """Whether these are the model's weights: every parameter is there, with its shape; dtype and device may differ.
    Those that the model holds already (``held``) may be missing.

    Of tied parameters one name is enough; if several come, they must be equal. Raises WeightsError for unknown, missing
    or repeated names and for other shapes.
    """
    own = model.state_dict(keep_vars=True)
    new: dict[str, Tensor] = {}
    by_identity: dict[int, str] = {}
    for name, tensor in weights:
        _check_one(name, tensor, own, new)
        twin = by_identity.setdefault(id(own[name]), name)
        if twin != name and not torch.equal(new[twin], tensor):
            raise WeightsError(f"weights {name}: differs from {twin}, but this model ties the two")
        new[name] = tensor
    there = {*by_identity, *(id(own[name]) for name in held if name in own)}
    missing = sorted(name for name, own_tensor in model.named_parameters() if id(own_tensor) not in there)
    if missing:
        raise WeightsError(f"weights: {len(missing)} of this model's parameters are missing, first {missing[0]!r}")


def _check_one(name: str, tensor: Tensor, own: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    if name not in own:
        raise WeightsError(f"weights {name}: this model has no such tensor{nearest(name, own)}")
    if name in new:
        raise WeightsError(f"weights {name}: published twice")
    if tensor.shape != own[name].shape:
        found, wanted = tuple(tensor.shape), tuple(own[name].shape)
        raise WeightsError(f"weights {name}: shape {found}, this model has {wanted}")


def take_weights(model: torch.nn.Module, weights: Named, held: frozenset[str] = frozenset()) -> None:
    """Check them, then copy them in place."""
    check_weights(model, weights, held)
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)


def adopt_weights(model: torch.nn.Module, weights: Named, held: frozenset[str] = frozenset()) -> None:
    """Check them, then make them the model's own: nothing is copied where dtype and device are the model's already.

    The caller must leave these tensors alone from then on.
    """
    check_weights(model, weights, held)
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in weights:
            mine = own[name]
            alike = tensor.dtype == mine.dtype and tensor.device == mine.device
            if alike and isinstance(mine, torch.nn.Parameter):
                mine.data = tensor
            else:
                mine.copy_(tensor)
