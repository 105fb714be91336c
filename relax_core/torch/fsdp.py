"""A model whose parameters are divided over ranks (FSDP2): every decoder layer is gathered when it is computed.

Gathering and summing are collective: ranks run equally many forwards and backwards, in the same order. Everything
outside of the decoder's layers (embeddings, head, towers of media) is one unit that is gathered from the forward to the
end of the backward pass. A parameter of it that a rank's rows do not reach gets a gradient of zeros there, so that
ranks with and without media sum the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from relax_core.errors import ConfigError
from relax_core.torch.host_memory import Put
from relax_core.torch.ranks import Ranks

T = TypeVar("T")


class _Root(nn.Module):
    """FSDP's outermost module: adapters call backbone and head on parts of the model, and both must lie inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        return call()


class Shards:
    """Divides a model's parameters in place; they keep their names. ``dtype``: of forward and backward."""

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype, ranks: Ranks) -> None:
        self.model, self.dtype = model, dtype
        self.calls = 0
        """Forwards so far."""
        self.reached: set[str] = set()
        """Parameters to which a backward pass led on this rank since this was cleared."""
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        mesh = init_device_mesh(device, (ranks.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        layers = decoder_layers(model)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        self._inside = [name for name, p in model.named_parameters() if id(p) in inside and p.requires_grad]
        self.root = _Root(model)
        fully_shard(self.root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def run(self, call: Callable[[], T]) -> T:
        """What ``call`` gives, in which the model runs; tensors in it lead to the parameters."""
        self.calls += 1
        return cast(T, self.root(call))

    def reshard(self) -> None:
        """Let go of what a forward without backward pass has gathered."""
        cast(FSDPModule, self.root).reshard()

    def anchored(self, outputs: Sequence[Tensor], counts: bool = True) -> Tensor:
        """Zero, whose backward pass takes part in what is collective, even if nothing else leads to ``outputs``.

        Add it to each loss. ``counts``: whether what is reached is ``reached``.
        """

        def complete() -> None:
            """At the end of the backward pass, before the outermost unit's gradients are summed."""
            inside = set(self._inside)
            if counts:
                self.reached |= inside
            for name, p in self.model.named_parameters():
                if not p.requires_grad or name in inside:
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif counts:
                    self.reached.add(name)

        return cast(Tensor, _Anchor.apply(complete, *outputs))  # type: ignore[no-untyped-call]

    def move(self, put: Put) -> None:
        """All parts, and the buffers, to where ``put`` copies them, each once."""
        there: set[int] = set()

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) in there:  # a tied one, under its other name
                return tensor
            there.add(id(tensor))
            if not isinstance(tensor, DTensor):
                return put(tensor)
            # A divided tensor around another part. DTensor.from_local would take the part to the mesh's device.
            divided: Any = tensor
            names, about = divided.__tensor_flatten__()
            inner = {name: getattr(divided, name) for name in names} | {"_local_tensor": put(part_of(tensor))}
            return cast(Tensor, divided.__tensor_unflatten__(inner, about, tensor.shape, tensor.stride()))

        cast(Any, self.root)._apply(moved)  # what Module.to does with a function of its own


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, complete: Callable[[], None], *outputs: Tensor) -> Tensor:
        ctx.complete = complete
        ctx.like = [torch.empty_like(output, device="meta") for output in outputs]
        ctx.device = outputs[0].device
        return torch.zeros((), device=ctx.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ctx.complete)  # FSDP queues its own afterwards, and they run in order
        return None, *(torch.zeros_like(like, device=ctx.device) for like in ctx.like)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model's text decoder. Raises ConfigError where there are none to be found."""
    found: Any = getattr(model, "get_decoder", lambda: None)()
    layers = getattr(found, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
        layers = max(lists, key=lambda module: sum(p.numel() for p in module.parameters()), default=None)
    if layers is None:
        raise ConfigError(
            f"trainer.sharding: found 'fsdp', and {type(model).__name__} has no list of layers to divide; set it to "
            "'replicate'"
        )
    return list(layers)


# --- parts and wholes -------------------------------------------------------------------------------------------------


def part_of(parameter: Tensor) -> Tensor:
    """This rank's part of a divided tensor, the same memory; of another, the tensor itself."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def whole(like: Tensor, part: Tensor | None = None) -> Tensor:
    """All of a tensor, from every rank's part (collective); ``part``: of another one that is divided as ``like`` is."""
    if not isinstance(like, DTensor):
        return like.detach() if part is None else part.detach()
    own = like.to_local() if part is None else part
    spread = DTensor.from_local(
        own.detach(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread.full_tensor()


def cut_as(like: Tensor, full: Tensor) -> Tensor:
    """This rank's part of ``full``, divided as ``like`` is. Every rank has the same ``full``."""
    if not isinstance(like, DTensor):
        return full
    own = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return own.to_local().detach()
