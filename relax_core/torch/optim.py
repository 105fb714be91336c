"""AdamW with float32 master weights, and learning rates that are functions of the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from relax_core.torch.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """The learning rate of a step; they count from 0 and a run has ``steps`` of them. The last gets the minimum."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by their Hugging Face names; tied ones once, under the first."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


class Optimizer:
    """Sums the gradients of micro-batches, and updates the model.

    Parameters of half precision have float32 masters: gradients are added to these after each backward pass, AdamW
    changes these, and the parameters are rounded from them. Float32 parameters are their own masters.
    """

    def __init__(self, model: torch.nn.Module, config: TrainerConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        decayed = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def clear(self) -> None:
        """Forget the gradient."""
        self._adamw.zero_grad(set_to_none=True)

    def reduce(self, count: float) -> float:
        """Divide the summed gradient by ``count``, then clip it. Returns its norm before clipping.

        A gradient that is zero or not finite is left as it is.
        """
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        if not gradients:
            return 0.0
        norm = float(get_total_norm(gradients)) / count
        if norm == 0 or not math.isfinite(norm):
            return norm
        clip = self.config.clip
        factor = (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))) / count
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def update(self, step: int) -> None:
        """One AdamW update with the gradient as it stands, which is then forgotten."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self.config, step, self.steps)
        self._adamw.step()
        self.clear()
        self.spread()

    @torch.no_grad()
    def spread(self) -> None:
        """Round the masters into the parameters."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def masters(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name."""
        return {name: m.detach() for name, m in self._masters.items()}

    def state(self) -> dict[str, Any]:
        """AdamW's averages and counts."""
        return dict(self._adamw.state_dict())

    def restore(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state)


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    master = torch.nn.Parameter(parameter.detach().float())

    def move_gradient(half: Tensor) -> None:
        assert half.grad is not None
        gradient = half.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        half.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)  # type: ignore[no-untyped-call]
    return master
