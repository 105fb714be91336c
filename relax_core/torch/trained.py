"""A copy of the run's model to train: where it lives, in which precision, and without dropout."""

from __future__ import annotations

from typing import Any

import torch

from relax_core.errors import ConfigError
from relax_core.interfaces import ModelAdapter
from relax_core.torch.config import TrainerConfig


def load_trained(config: TrainerConfig, adapter: ModelAdapter) -> torch.nn.Module:
    """A fresh copy of the initial model, all of it with gradient.

    Dropout is off, since engine and trainer must agree on the policy.
    """
    device = device_of(config)
    model = adapter.load(device, _dtype(config, device))
    _without_dropout(model, config.gradient_checkpointing)
    return model.requires_grad_(True)


def device_of(config: TrainerConfig) -> str:
    """``cpu`` or ``cuda``."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(config: TrainerConfig, device: str) -> torch.dtype:
    name = ("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _without_dropout(model: torch.nn.Module, checkpointing: bool) -> None:
    """Evaluation mode; or, for gradient checkpointing, training mode with every probability at 0."""
    model.eval()
    if not checkpointing:
        return
    # The newer name first: the older one warns where both exist.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(f"trainer.gradient_checkpointing: {type(model).__name__} does not offer it; leave it out")
    enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = name.endswith("dropout") or (
                name == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd)
            )
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
