"""What every transport does first: copy the weights into a flat buffer, and say what it then holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from relax_core.interfaces import ComponentConfig
from relax_core.types import Version
from relax_core.weight_sums import BLOCK, Sums, checksum, checksums
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
        infos = [info._replace(checksum=checksum(t)) for info, (_, t) in zip(described(still), still, strict=True)]
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


class Flat:
    """A flat buffer (uint8) for tensors of these names, shapes and dtypes, which are copied into it again and again.

    The views of the buffer are made once: there are hundreds, and the trainer waits while it publishes.
    """

    def __init__(self, buffer: Tensor, infos: Sequence[TensorInfo]) -> None:
        import torch

        self.buffer, self.infos, self.starts = buffer, infos, offsets(infos)
        self.targets = views(buffer, infos, self.starts)
        ends = (start + info.nbytes for info, start in zip(infos, self.starts, strict=False))
        pads = [buffer[end:start] for end, start in zip(ends, self.starts[1:], strict=True) if end < start]
        if pads:
            torch._foreach_zero_(pads)

    def fill(self, named: Named, sums: bool) -> list[TensorInfo]:
        """Copy the tensors into the buffer, and say what it then holds."""
        on_cpu = self.buffer.device.type == "cpu" and all(tensor.device.type == "cpu" for _, tensor in named)
        found = self._fill_blocks(named, sums) if on_cpu else self._fill_at_once(named, sums)
        if not sums:
            return list(self.infos)
        return [TensorInfo(*info[:-1], sum_) for info, sum_ in zip(self.infos, found, strict=True)]

    def _fill_blocks(self, named: Named, sums: bool) -> list[int]:
        """Each block is summed when it was copied, while it is in the cache."""
        summed = Sums(self.buffer, self.starts) if sums else None
        for (_, tensor), target, start, end in zip(named, self.targets, self.starts, self.starts[1:], strict=False):
            for done in _pieces(target, tensor):
                if summed is not None:
                    summed.advance(start + done)
            if summed is not None:
                summed.advance(end)
        return summed.found if summed is not None else []

    def _fill_at_once(self, named: Named, sums: bool) -> list[int]:
        """From or to a GPU: few and large calls, and sums made there."""
        import torch

        sources = [tensor.detach() for _, tensor in named]
        if sources:
            torch._foreach_copy_(self.targets, sources, non_blocking=True)
        from relax_core.torch.device_sums import tensor_sums

        found: list[int] = []
        if sums and self.buffer.device.type == "cpu" and len({tensor.device for tensor in sources}) == 1:
            found = tensor_sums(sources)
        elif sums:
            found = checksums(self.buffer, self.starts)
        if self.buffer.device.type == "cpu":
            torch.cuda.synchronize()
        return found


def next_flat(flats: list[Flat], named: Named) -> Flat:
    """The older of two buffers, or a new one, on the device of the first tensor; it becomes the newest of the list."""
    import torch

    infos = described(named)
    device = named[0][1].device if named else torch.device("cpu")
    flat = flats.pop(0) if len(flats) == 2 else None
    if flat is None or flat.buffer.device != device or flat.infos != infos:
        flat = None  # its memory, before the new one's
        flat = Flat(torch.empty(offsets(infos)[-1], dtype=torch.uint8, device=device), infos)
    flats.append(flat)
    return flat


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
