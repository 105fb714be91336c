"""Published weights: a manifest with a checksum per tensor, and the receiver's check against it.

All tensors of a publication lie in one flat buffer, each at a multiple of 256 bytes with zeros up to the next. The
checksum of a tensor is a sum over its 32-bit words, each times its position:

    sum over i of (2 i + 1) x word_i   mod 2**64

Any changed bit changes it (an odd number times a power of two below 2**64 is not 0), and so does swapping any two
unequal elements of at most 32 bits. Every sum is exact, so the order in which a device adds does not matter.

Legend: R rows of 64 words, N tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relax_core.errors import WeightsError
from relax_core.types import Version

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WORDS = 64
ALIGNMENT = 4 * _WORDS
"""Bytes; every tensor of a buffer starts at a multiple of it."""
_BLOCK = {"cpu": 1 << 9}
"""Rows that are summed at once: on a CPU so few that they stay in the cache."""
_BUCKET = 1 << 28
"""Bytes that a receiver copies and verifies at once; a larger tensor makes a bucket of its own."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A published tensor. ``dtype`` is torch's name without the prefix, such as ``bfloat16``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int

    @property
    def nbytes(self) -> int:
        import torch

        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a publication consists of, in order."""

    version: Version
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, padding aside."""
        return sum(info.nbytes for info in self.tensors)


class Handle(Protocol):
    """Where a publication's buffer is, for a receiver; picklable where the transport crosses processes."""

    def read(self, start: int, stop: int) -> Tensor:
        """A copy (uint8) of these bytes of the buffer, which the receiver owns. Raises WeightsError when it is gone."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A publication, as it travels to engines."""

    manifest: Manifest
    handle: Handle

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor): the receiver's own copies, each verified. Read them all before serving any.

        Raises WeightsError, with the tensor's name and both checksums, when a tensor is not what was published.
        """
        for infos, start, stop in _buckets(self.manifest.tensors):
            data = self.handle.read(start, stop)
            if data.numel() != stop - start:
                raise WeightsError(
                    f"weights {infos[0].name}: the buffer of version {self.manifest.version.number} has "
                    f"{data.numel()} bytes, its manifest says {stop - start}; publish the weights again"
                )
            starts = offsets(infos)
            for info, offset, found in zip(infos, starts, checksums(data, starts), strict=False):
                _compare(info, found)
                yield info.name, view(data, offset, info.shape, info.dtype)


def offsets(infos: Sequence[TensorInfo]) -> list[int]:
    """Where each tensor starts in a buffer of them, and then the buffer's size, in bytes."""
    found = [0]
    for info in infos:
        found.append(found[-1] + -(-info.nbytes // ALIGNMENT) * ALIGNMENT)
    return found


def view(buffer: Tensor, start: int, shape: Sequence[int], dtype: str) -> Tensor:
    """A tensor of the buffer (uint8) that starts at this byte."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return buffer[start : start + math.prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def checksum(tensor: Tensor) -> int:
    """The checksum of a tensor's bits, on its device; the result alone is copied to the host. Any dtype and layout."""
    import torch

    data = tensor.detach().contiguous().flatten()
    size = -(-data.nbytes // ALIGNMENT) * ALIGNMENT
    padded = data.new_zeros(size // data.element_size())
    padded[: data.numel()] = data
    return checksums(padded.view(torch.uint8), [0, size])[0]


def checksums(buffer: Tensor, starts: Sequence[int]) -> list[int]:
    """The checksums of the N tensors in a buffer (uint8); ``starts`` are N + 1 offsets as ``offsets`` gives them.

    The buffer stays on its device; the N sums come to the host in one transfer.
    """
    import torch

    if len(starts) < 2:
        return []
    words_RW = buffer.view(torch.int32).view(-1, _WORDS)
    plain_R, weighted_R = _row_sums(words_RW)
    # Sums up to each row, positions counted from the buffer's start; a tensor's own positions start at its first row.
    row_R = torch.arange(len(plain_R), device=buffer.device)
    upto_R = torch.cat([plain_R.new_zeros(1), (weighted_R + 2 * _WORDS * row_R * plain_R).cumsum(0)])
    plain_upto_R = torch.cat([plain_R.new_zeros(1), plain_R.cumsum(0)])
    bounds = torch.tensor(starts, device=buffer.device) // ALIGNMENT
    first_N, end_N = bounds[:-1], bounds[1:]
    shift_N = 2 * _WORDS * first_N * (plain_upto_R[end_N] - plain_upto_R[first_N])
    sums_N = upto_R[end_N] - upto_R[first_N] - shift_N
    return [int(s) % (1 << 64) for s in sums_N.tolist()]


def _row_sums(words_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the sum of its words, and the sum of its words times 1, 3, 5, ...; int64 (R,).

    Summed by one matrix product in float64, which is fast everywhere, and exact: no sum of 64 words times at most 127
    reaches 2**53.
    """
    import torch

    odd_W = 2 * torch.arange(_WORDS, device=words_RW.device, dtype=torch.float64) + 1
    factors_W2 = torch.stack([torch.ones_like(odd_W), odd_W], 1)
    blocks = torch.split(words_RW, _BLOCK.get(words_RW.device.type, 1 << 20))
    sums_R2 = torch.cat([(block_RW.to(torch.float64) @ factors_W2).to(torch.int64) for block_RW in blocks])
    return sums_R2[:, 0], sums_R2[:, 1]


def _compare(info: TensorInfo, found: int) -> None:
    if found != info.checksum:
        raise WeightsError(
            f"weights {info.name}: checksum {found:016x}, the manifest says {info.checksum:016x}: it was altered, "
            "or written over by a later publication; publish the weights again"
        )


def verify(info: TensorInfo, tensor: Tensor) -> None:
    """Whether a tensor is the one that was published. Raises WeightsError with what was expected and found."""
    for what, found, expected in (
        ("shape", tuple(tensor.shape), info.shape),
        ("dtype", dtype_name(tensor), info.dtype),
    ):
        if found != expected:
            raise WeightsError(f"weights {info.name}: {what} {found}, the manifest says {expected}")
    _compare(info, checksum(tensor))


def _buckets(tensors: Sequence[TensorInfo]) -> Iterator[tuple[Sequence[TensorInfo], int, int]]:
    """Consecutive tensors with the bytes of the buffer in which they lie."""
    starts = offsets(tensors)
    first = 0
    for i in range(1, len(tensors) + 1):
        if i == len(tensors) or starts[i + 1] - starts[first] > _BUCKET:
            yield tensors[first:i], starts[first], starts[i]
            first = i
