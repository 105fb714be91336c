"""A copy of the run's model to train: where it lives, in which precision, and without dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from relax_core.errors import ConfigError
from relax_core.interfaces import ModelAdapter
from relax_core.torch.config import TrainerConfig
from relax_core.torch.fsdp import Shards
from relax_core.torch.ranks import Ranks


def load_trained(config: TrainerConfig, adapter: ModelAdapter, device: str | None = None) -> torch.nn.Module:
    """A fresh copy of the initial model, with gradient but for what is ``frozen``. ``device``: default: the config's.

    Dropout is off, since engine and trainer must agree on the policy.
    """
    model = adapter.load(device or device_of(config), dtype_of(config))
    _without_dropout(model, config.gradient_checkpointing)
    model.requires_grad_(True)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in config.frozen):
            parameter.requires_grad_(False)
    return model


def load_divided(
    config: TrainerConfig,
    adapter: ModelAdapter,
    ranks: Ranks,
    change: Callable[[torch.nn.Module], None] = lambda model: None,
) -> tuple[torch.nn.Module, Shards | None]:
    """``load_trained``; where the config divides it over the ranks, it is and the shards are given too.

    ``change``: what to do to the model before.
    """
    divided = config.sharding == "fsdp" and not ranks.alone
    model = load_trained(config, adapter, "cpu" if divided else None)  # a device need not hold all of it
    change(model)
    return model, Shards(model, device_of(config), dtype_of(config), ranks) if divided else None


def check_frozen(config: TrainerConfig, model: torch.nn.Module) -> None:
    """Raise ConfigError for a pattern of ``frozen`` that no parameter matches, and where nothing is left to train."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    problems = [
        f"trainer.frozen.{i}: found {pattern!r}, which matches no parameter of {type(model).__name__}; "
        f"{_nearest(pattern, names)}"
        for i, pattern in enumerate(config.frozen)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if not problems and not any(p.requires_grad for p in model.parameters()):
        problems = [f"trainer.frozen: found {', '.join(config.frozen)}, which leaves no parameter to train; name fewer"]
    if problems:
        raise ConfigError(*problems)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """What the names that are most like a pattern are."""
    word = pattern.strip("*.")
    parts = {part for name in names for part in (name, *name.split("."))}
    near = get_close_matches(word, sorted(parts), 3, 0.5) or sorted(names)[:3]
    return f"the nearest names are {', '.join(near)}"


def device_of(config: TrainerConfig) -> str:
    """``cpu`` or ``cuda``."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(config: TrainerConfig) -> torch.dtype:
    """Of forward, backward and published weights."""
    device = device_of(config)
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
