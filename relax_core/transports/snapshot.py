"""What every transport does first: copy the weights into a flat buffer, and say what it then holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.interfaces import ComponentConfig
from relax_core.types import Version
from relax_core.weight_sums import BLOCK, Sums, checksum, checksums, tensor_sums
from relax_core.weights import (
    Base,
    Handle,
    Manifest,
    TensorInfo,
    WeightUpdate,
    content_id,
    dtype_name,
    offsets,
    short,
    views,
)

if TYPE_CHECKING:
    from torch import Tensor

Named = Sequence[tuple[str, "Tensor"]]
Placed = tuple[Sequence[TensorInfo], Handle]
"""What a buffer holds, and where it is."""


class TransportConfig(ComponentConfig):
    """What all transports can be told."""

    checksums: bool = True
    """Whether every tensor is summed when it is published and when it is received; leave it on outside benchmarks."""


class Publisher:
    """Cuts weights into a base and the rest, and keeps the base until its bits change.

    ``place`` copies tensors where receivers find them: with True into memory that stays as it is (a base), else into
    one of two buffers in turn. ``drop`` frees a base's memory.
    """

    def __init__(self, place: Callable[[Named, bool], Placed], drop: Callable[[Handle], None], sums: bool) -> None:
        self._place, self._drop, self._sums = place, drop, sums
        self._bases: list[Base] = []

    def publish(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        named = list(weights)
        still = [pair for pair in named if pair[0] in frozen]
        base = self._base(version, still) if still else None
        moving, handle = self._place([pair for pair in named if pair[0] not in frozen], False)
        found = {info.name: info for info in (*(base.tensors if base else ()), *moving)}
        if len(found) < len(named):  # a name came twice: the receiver will say so
            return WeightUpdate(Manifest(version, (*(base.tensors if base else ()), *moving)), handle, base)
        return WeightUpdate(Manifest(version, tuple(found[name] for name, _ in named)), handle, base)

    def _base(self, version: Version, still: Named) -> Base:
        """The base with these bits. They are summed anew, so that a change that nobody announced still travels."""
        infos = [replace(info, checksum=checksum(t)) for info, (_, t) in zip(described(still), still, strict=True)]
        id = content_id(infos)
        for base in self._bases:
            if base.id == id:
                return base
        placed, handle = self._place(still, True)
        self._bases.append(Base(id, tuple(placed), handle))
        if len(self._bases) > 2:
            self._drop(self._bases.pop(0).handle)
        return self._bases[-1]

    def clear(self) -> None:
        self._bases.clear()


def described(named: Named) -> list[TensorInfo]:
    """The tensors without checksums yet."""
    return [TensorInfo(name, tuple(tensor.shape), dtype_name(tensor), None) for name, tensor in named]


def fill(buffer: Tensor, named: Named, sums: bool) -> list[TensorInfo]:
    """Copy the tensors into the buffer (uint8), and say what it then holds."""
    infos = described(named)
    starts = offsets(infos)
    on_cpu = buffer.device.type == "cpu" and all(tensor.device.type == "cpu" for _, tensor in named)
    found = (_fill_blocks if on_cpu else _fill_at_once)(buffer, named, infos, starts, sums)
    return [replace(info, checksum=sum_) for info, sum_ in zip(infos, found, strict=True)] if sums else infos


def _fill_blocks(
    buffer: Tensor, named: Named, infos: Sequence[TensorInfo], starts: Sequence[int], sums: bool
) -> list[int]:
    """Each block is summed when it was copied, while it is in the cache."""
    summed = Sums(buffer, starts) if sums else None
    targets = views(buffer, infos, starts)
    for (_, tensor), target, info, start, end in zip(named, targets, infos, starts, starts[1:], strict=False):
        buffer[start + info.nbytes : end] = 0
        for done in _pieces(target, tensor):
            if summed is not None:
                summed.advance(start + done)
        if summed is not None:
            summed.advance(end)
    return summed.found if summed is not None else []


def _fill_at_once(
    buffer: Tensor, named: Named, infos: Sequence[TensorInfo], starts: Sequence[int], sums: bool
) -> list[int]:
    """From or to a GPU: few and large calls, and sums made there."""
    import torch

    targets = views(buffer, infos, starts)
    if pads := [
        buffer[start + i.nbytes : end]
        for i, start, end in zip(infos, starts, starts[1:], strict=False)
        if start + i.nbytes < end
    ]:
        torch._foreach_zero_(pads)
    sources = [tensor.detach() for _, tensor in named]
    if sources:
        torch._foreach_copy_(targets, sources, non_blocking=True)
    if not sums:
        found = []
    elif buffer.device.type == "cpu" and len({tensor.device for tensor in sources}) == 1:
        found = tensor_sums(sources)
    else:
        found = checksums(buffer, starts)
    if buffer.device.type == "cpu":
        torch.cuda.synchronize()
    return found


def _pieces(target: Tensor, tensor: Tensor) -> Iterator[int]:
    """Copy a tensor by blocks that stay in the cache; how many bytes are copied."""
    import torch

    if not tensor.is_contiguous():
        target.copy_(tensor.detach())
        yield target.nbytes
        return
    out, data = (t.detach().flatten().view(torch.uint8).numpy() for t in (target, tensor))
    for at in range(0, len(data), BLOCK):
        out[at : at + BLOCK] = data[at : at + BLOCK]
        yield min(at + BLOCK, len(data))


def copied(out: Tensor, source: Tensor, start: int) -> Iterator[int]:
    """Fill ``out`` (uint8) from a buffer of the same machine; how many bytes are copied."""
    if start + out.numel() > source.numel():
        raise short(source.numel(), start + out.numel())
    if out.device.type != "cpu" or source.device.type != "cpu":
        out.copy_(source[start : start + out.numel()])
        yield out.numel()
        return
    target, data = out.numpy(), source.numpy()
    for at in range(0, len(target), BLOCK):
        stop = min(at + BLOCK, len(target))
        target[at:stop] = data[start + at : start + stop]
        yield stop
    if not len(target):
        yield 0
