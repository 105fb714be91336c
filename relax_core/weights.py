"""Published weights: a manifest with a checksum per tensor, and the receiver's check against it.

All tensors of a publication lie in one flat buffer, each at a multiple of 4096 bytes with zeros up to the next. Tensors
that training cannot change lie in a publication of their own, the *base*, which a receiver reads once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from relax_core.errors import WeightsError
from relax_core.types import Version
from relax_core.weight_sums import ALIGNMENT, checksum, compare, summing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BUCKET = 1 << 28
"""Bytes that a receiver without buffers of its own copies and verifies at once; a larger tensor has its own."""


class TensorInfo(NamedTuple):
    """A published tensor. ``dtype`` is torch's name without the prefix, such as ``bfloat16``.

    ``checksum`` is None where the transport was told to make none. A tuple, because a publication makes and pickles
    hundreds while engines wait.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int | None

    @property
    def nbytes(self) -> int:
        import torch

        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a publication consists of, in order; the tensors of its base are listed too."""

    version: Version
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, padding aside."""
        return sum(info.nbytes for info in self.tensors)


Links = dict[str, Any]
"""What a receiver keeps from one update to the next: mappings, connections, places in groups. Emptied by ``unlink``."""


class Handle(Protocol):
    """Where a publication's buffer is, for a receiver; picklable where the transport crosses processes."""

    @property
    def device(self) -> str:
        """Where a receiver's buffer should lie."""

    def fill(self, out: Tensor, start: int, links: Links) -> Iterator[int]:
        """Copy the buffer's bytes from ``start`` on into ``out`` (uint8); say now and then how many are there.

        Raises WeightsError when the publication is gone, or has fewer bytes.
        """


@dataclass(frozen=True, slots=True)
class Base:
    """The tensors that training cannot change, as they were published once. Equal bits have an equal ``id``."""

    id: str
    tensors: tuple[TensorInfo, ...]
    handle: Handle


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A publication, as it travels to engines. The handle's buffer holds what the base does not."""

    manifest: Manifest
    handle: Handle
    base: Base | None = None

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors in the base."""
        return frozenset(info.name for info in self.base.tensors) if self.base else frozenset()

    @property
    def moving(self) -> tuple[TensorInfo, ...]:
        """The tensors in the handle's buffer."""
        frozen = self.frozen
        return tuple(info for info in self.manifest.tensors if info.name not in frozen)

    def tensors(self, held: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor): the receiver's own copies, each verified. Read them all before serving any.

        Those of the base come first, and are left out for a receiver that holds it (``held``: its id). Raises
        WeightsError, with the tensor's name and both checksums, when a tensor is not what was published.
        """
        import torch

        links: Links = {}
        try:
            for infos, handle in self.parts(held):
                for some, start, stop in _buckets(infos):
                    out = torch.empty(stop - start, dtype=torch.uint8, device=handle.device)
                    yield from received(some, handle, out, start, links)
        finally:
            unlink(links)

    def parts(self, held: str | None = None) -> Iterator[tuple[tuple[TensorInfo, ...], Handle]]:
        """What a receiver reads, and from where."""
        if self.base is not None and self.base.id != held:
            yield self.base.tensors, self.base.handle
        yield self.moving, self.handle


def blank(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same names, shapes and dtypes with zeros, which take no memory."""
    for name, tensor in weights:
        yield name, tensor.new_zeros(()).expand(tensor.shape)


def received(
    infos: Sequence[TensorInfo], handle: Handle, out: Tensor, start: int, links: Links
) -> list[tuple[str, Tensor]]:
    """Copy consecutive tensors of a buffer into ``out`` (uint8), verify them, and give the views."""
    starts = offsets(infos)
    sums = summing(out, starts) if any(info.checksum is not None for info in infos) else None
    tensors: list[Tensor] | None = None
    done = 0
    for done in handle.fill(out, start, links):
        if sums is not None:
            sums.advance(done)
        if tensors is None:  # while more is on its way
            tensors = views(out, infos, starts)
    if done != starts[-1]:
        raise WeightsError(f"weights {infos[0].name}: {done} of {starts[-1]} bytes came; publish the weights again")
    if sums is not None:
        for info, found in zip(infos, sums.found, strict=True):
            compare(info.name, found, info.checksum)
    return list(zip((info.name for info in infos), tensors or views(out, infos, starts), strict=True))


def short(found: int, wanted: int) -> WeightsError:
    """For a handle whose publication has fewer bytes than the manifest says."""
    return WeightsError(f"weights: the buffer has {found} bytes, its manifest says {wanted}; publish the weights again")


def unlink(links: Links) -> None:
    """Close what a receiver keeps."""
    while links:
        _, link = links.popitem()
        if (close := getattr(link, "close", None)) is not None:
            with contextlib.suppress(BufferError):  # a failed receive still looks at it
                close()


def offsets(infos: Sequence[TensorInfo]) -> list[int]:
    """Where each tensor starts in a buffer of them, and then the buffer's size, in bytes."""
    import torch

    sizes: dict[str, int] = {name: getattr(torch, name).itemsize for name in {info.dtype for info in infos}}
    rounded = (-(-math.prod(info.shape) * sizes[info.dtype] // ALIGNMENT) * ALIGNMENT for info in infos)
    return [0, *itertools.accumulate(rounded)]


def views(buffer: Tensor, infos: Sequence[TensorInfo], starts: Sequence[int]) -> list[Tensor]:
    """The tensors of a buffer (uint8, contiguous), which begin at these bytes.

    Each is one call of torch's: there are hundreds, and each call takes as long as a GPU needs for megabytes.
    """
    import torch

    kinds: dict[str, torch.dtype] = {name: getattr(torch, name) for name in {info.dtype for info in infos}}
    typed = {name: buffer[: len(buffer) // kind.itemsize * kind.itemsize].view(kind) for name, kind in kinds.items()}
    first = {name: whole.storage_offset() for name, whole in typed.items()}
    return [
        typed[info.dtype].as_strided(
            info.shape, _strides(info.shape), first[info.dtype] + start // kinds[info.dtype].itemsize
        )
        for info, start in zip(infos, starts, strict=False)
    ]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dtype_name(tensor: Tensor) -> str:
    return _name(tensor.dtype)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def content_id(infos: Sequence[TensorInfo]) -> str:
    """Equal for equal names, shapes, dtypes and checksums."""
    listed = "\n".join(f"{i.name} {i.shape} {i.dtype} {i.checksum}" for i in infos)
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


def verify(info: TensorInfo, tensor: Tensor) -> None:
    """Whether a tensor is the one that was published. Raises WeightsError with what was expected and found."""
    for what, found, expected in (
        ("shape", tuple(tensor.shape), info.shape),
        ("dtype", dtype_name(tensor), info.dtype),
    ):
        if found != expected:
            raise WeightsError(f"weights {info.name}: {what} {found}, the manifest says {expected}")
    if info.checksum is not None:
        compare(info.name, checksum(tensor), info.checksum)


def _buckets(tensors: Sequence[TensorInfo]) -> Iterator[tuple[Sequence[TensorInfo], int, int]]:
    """Consecutive tensors with the bytes of the buffer in which they lie."""
    starts = offsets(tensors)
    first = 0
    for i in range(1, len(tensors) + 1):
        if i == len(tensors) or starts[i + 1] - starts[first] > _BUCKET:
            yield tensors[first:i], starts[first], starts[i]
            first = i
