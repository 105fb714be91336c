"""AdamW with float32 master weights, and learning rates that are functions of the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from relax_core.torch.config import TrainerConfig
from relax_core.torch.fsdp import Shards, cut_as, part_of, whole
from relax_core.torch.host_memory import Put
from relax_core.torch.ranks import ALONE, Ranks

_BUCKET = 1 << 24
"""Elements of gradients that are summed over ranks at once."""


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
    changes these, and the parameters are rounded from them. Float32 parameters are their own masters; of divided ones
    (``shards``) a rank's masters are its parts.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: TrainerConfig,
        steps: int,
        ranks: Ranks = ALONE,
        shards: Shards | None = None,
    ) -> None:
        self.config, self.steps, self.ranks, self.shards = config, steps, ranks, shards
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

    # --- gradients ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the gradient."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None
        if self.shards is not None:
            self.shards.reached.clear()

    def reached(self) -> list[bool]:
        """Of each parameter, in order: whether the open update's rows of this rank led to it."""
        if self.shards is None:
            return [m.grad is not None for m in self._masters.values()]
        return [
            name in self.shards.reached if isinstance(p, DTensor) else self._masters[name].grad is not None
            for name, p in self._divided_names()
        ]

    def _divided_names(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by the name that ``shards`` knows it by."""
        assert self.shards is not None
        known = {id(p): name for name, p in self.shards.model.named_parameters()}
        for name, p in self._parameters.items():
            yield known.get(id(p), name), p

    def sum_over_ranks(self, reached: Sequence[bool]) -> None:
        """Sum the gradient over ranks. ``reached``: of each parameter, whether the rows of any rank led to it."""
        whole_ones: list[Tensor] = []
        for (name, master), found in zip(self._masters.items(), reached, strict=True):
            parameter = self._parameters[name]
            if isinstance(parameter, DTensor):  # FSDP has summed it already
                gradient = parameter.grad
                master.grad = part_of(gradient) if found and gradient is not None else None
                parameter.grad = None
            elif found:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                whole_ones.append(master.grad)
            else:
                master.grad = None
        for bucket in _buckets(whole_ones):
            flat = self.ranks.sum_(torch.cat([gradient.flatten() for gradient in bucket]))
            for gradient, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def reduce(self, count: float) -> float:
        """Divide the summed gradient by ``count``, then clip it. Returns its norm before clipping.

        A gradient that is zero or not finite is left as it is. The norm is the same on all ranks.
        """
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        if not gradients:
            return 0.0
        norm = self._norm() / count
        if norm == 0 or not math.isfinite(norm):
            return norm
        clip = self.config.clip
        factor = (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))) / count
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def _norm(self) -> float:
        """Of the whole gradient, whose parts may lie on several ranks."""
        if self.shards is None:
            found = [m.grad for m in self._masters.values() if m.grad is not None]
            return self.ranks.firsts(float(get_total_norm(found)))
        squares = {True: 0.0, False: 0.0}
        for name, master in self._masters.items():
            if master.grad is not None and master.grad.numel():
                norm = float(torch.linalg.vector_norm(master.grad, dtype=torch.float64))
                squares[isinstance(self._parameters[name], DTensor)] += norm**2
        return self.ranks.firsts(math.sqrt(self.ranks.sum([squares[True]])[0] + squares[False]))

    def gradients(self) -> dict[str, Tensor]:
        """After ``reduce``, by parameter name, whole. Collective where parameters are divided."""
        return {name: whole(self._parameters[name], m.grad) for name, m in self._masters.items() if m.grad is not None}

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
            if self._masters[name] is not parameter and not isinstance(parameter, DTensor):
                parameter.copy_(self._masters[name])

    # --- state --------------------------------------------------------------------------------------------------------

    def masters(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name. Collective where they are divided."""
        return {name: whole(self._parameters[name], m) for name, m in self._masters.items()}

    def state(self) -> dict[str, Any]:
        """AdamW's averages and counts by parameter name. Collective where they are divided."""
        return {
            "state": {
                name: {key: self._whole(name, key, value) for key, value in self._adamw.state[master].items()}
                for name, master in self._masters.items()
                if master in self._adamw.state
            }
        }

    def _whole(self, name: str, key: str, value: Tensor) -> Tensor:
        return value.detach() if key == "step" else whole(self._parameters[name], value)

    def restore(self, state: dict[str, Any]) -> None:
        """Take what ``state`` gave, under any division."""
        self.forget()
        for name, values in self.by_name(state).items():
            self.take(name, values)

    def by_name(self, state: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        """The averages of a state by parameter name; also of AdamW's own, which numbers them, as was saved once."""
        found: dict[Any, dict[str, Tensor]] = state["state"]
        if "param_groups" not in state:
            return {name: found[name] for name in self._masters if name in found}
        names = [name for flat in (False, True) for name, m in self._masters.items() if (m.ndim < 2) == flat]
        return {names[number]: values for number, values in found.items()}

    def forget(self) -> None:
        """All averages."""
        self._adamw.state.clear()

    @torch.no_grad()
    def take(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Averages and count of a parameter, whole."""
        master, like = self._masters[name], self._parameters[name]
        placed = {key: value.to(master.device, torch.float32) for key, value in values.items()}
        self._adamw.state[master] = {k: (v if k == "step" else cut_as(like, v)).clone() for k, v in placed.items()}

    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each parameter by name, and this rank's float32 part of it."""
        return {name: (self._parameters[name], m.detach()) for name, m in self._masters.items()}

    # --- memory -------------------------------------------------------------------------------------------------------

    def move(self, put: Put) -> None:
        """Masters and averages to where ``put`` copies them; the model's own must be there already. The gradient is
        forgotten."""
        self.clear()
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if isinstance(parameter, DTensor):
                master.data = part_of(parameter)
            elif master is not parameter:
                master.data = put(master)
            values = self._adamw.state.get(master, {})
            for key, value in values.items():
                values[key] = put(value)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is held beside the model: ``masters`` of their own, ``gradients``, ``optimizer``."""
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if master is not parameter and not isinstance(parameter, DTensor):
                yield "masters", master
            for gradient in {id(g): g for g in (master.grad, parameter.grad) if g is not None}.values():
                yield "gradients", part_of(gradient)
            for value in self._adamw.state.get(master, {}).values():
                yield "optimizer", value


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in order, so many together as a bucket holds."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(g.numel() for g in bucket) + gradient.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if isinstance(parameter, DTensor):
        return torch.nn.Parameter(part_of(parameter))
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
