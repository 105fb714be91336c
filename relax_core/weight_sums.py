"""Checksums of published tensors: summed while a copy is still in the cache, or on the tensors' own device.

A tensor's bytes, with zeros up to a multiple of 8, are 64-bit words in rows of 512. The sum of each row and the sum of
each lane (column), modulo 2**64, are exact in any order. Each of the two lists v is summed with its positions,

    P(v) = sum over k of (2 k + 1) x (low 32 bits of v_k + M x high 32 bits of v_k)   mod 2**64

and the checksum is P(rows) x 2**64 + P(lanes). Any changed bit changes both. Elements that change places change the
rows' sums, or the lanes', or both, though their total stays.

Legend: W words, R rows, L lanes, N tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from relax_core.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

LANES = 512
ROW = 8 * LANES
ALIGNMENT = ROW
"""Bytes; every tensor of a buffer starts at a multiple of it, with zeros before the next."""
BLOCK = 64 * ROW
"""Bytes that are copied, and then summed, at once: they stay in the cache in between."""
FACTOR = 0x9E3779B97F4A7C15
TOP = 1 << 64


def checksum(tensor: Tensor) -> int:
    """The checksum of a tensor's bits, on its device; the result alone is copied to the host. Any dtype and layout."""
    import torch

    if tensor.device.type != "cpu":
        from relax_core.torch.device_sums import tensor_sums

        return tensor_sums([tensor])[0]
    data = tensor.detach().contiguous().flatten()
    if data.nbytes % 8 or data.data_ptr() % 8:
        padded = data.new_zeros(-(-data.nbytes // ALIGNMENT) * ALIGNMENT // data.element_size())
        padded[: data.numel()] = data
        data = padded
    return checksums(data.view(torch.uint8), [0, data.nbytes])[0]


def checksums(buffer: Tensor, starts: Sequence[int]) -> list[int]:
    """The checksums of the N tensors in a buffer (uint8); ``starts`` are N + 1 offsets, multiples of ``ROW``.

    The buffer stays on its device; the sums come to the host in one transfer.
    """
    sums = summing(buffer, starts)
    sums.advance(starts[-1])
    return sums.found


def summing(buffer: Tensor, starts: Sequence[int]) -> Summing:
    """Sums the buffer as it fills."""
    if buffer.device.type == "cpu":
        return Sums(buffer, starts)
    from relax_core.torch.device_sums import DeviceSums

    return DeviceSums(buffer, starts)


class Summing(Protocol):
    """Checksums of the tensors in a buffer, while it fills."""

    @property
    def found(self) -> list[int]:
        """Of the tensors that are complete, in order."""

    def advance(self, upto: int) -> None:
        """The buffer holds its first ``upto`` bytes now."""


class Sums:
    """Sums a buffer (uint8, on the CPU) as it fills: ``advance`` after each piece; ``found`` has the complete ones."""

    def __init__(self, buffer: Tensor, starts: Sequence[int]) -> None:
        import numpy as np

        self.found: list[int] = []
        self._words_W: npt.NDArray[np.uint64] = buffer.numpy()[: starts[-1]].view(np.uint64)
        self._starts = [start // 8 for start in starts]
        self._at = 0
        self._lanes_L = np.zeros(LANES, np.uint64)
        self._rows_R = np.zeros(0, np.uint64)
        self._more()

    def advance(self, upto: int) -> None:
        """The buffer holds its first ``upto`` bytes now."""
        limit = upto // 8
        while len(self.found) < len(self._starts) - 1:
            start, end = self._starts[len(self.found)], self._starts[len(self.found) + 1]
            stop = min(end, self._at + BLOCK // 8)
            if stop > limit:
                if end <= limit or (limit - start) // LANES <= (self._at - start) // LANES:
                    return
                stop = start + (limit - start) // LANES * LANES
            self._add(self._at - start, self._words_W[self._at : stop])
            self._at = stop
            if stop == end:
                self.found.append(joined(_positions(self._rows_R), _positions(self._lanes_L)))
                self._more()

    def _more(self) -> None:
        """Begin the next tensor; those without a word are complete at once."""
        import numpy as np

        while len(self.found) < len(self._starts) - 1:
            size = self._starts[len(self.found) + 1] - self._starts[len(self.found)]
            self._lanes_L.fill(0)
            self._rows_R = np.zeros(-(-size // LANES), np.uint64)
            if size:
                return
            self.found.append(0)

    def _add(self, at: int, words_W: npt.NDArray[np.uint64]) -> None:
        import numpy as np

        row, whole = at // LANES, len(words_W) // LANES
        if whole:
            words_RL = words_W[: whole * LANES].reshape(whole, LANES)
            np.add.reduce(words_RL, axis=1, out=self._rows_R[row : row + whole])
            self._lanes_L += np.add.reduce(words_RL, axis=0)
        if len(rest := words_W[whole * LANES :]):
            self._rows_R[row + whole] = np.add.reduce(rest)
            self._lanes_L[: len(rest)] += rest


def _positions(sums_K: npt.NDArray[np.uint64]) -> int:
    import numpy as np

    mixed_K = (sums_K & np.uint64(0xFFFFFFFF)) + np.uint64(FACTOR) * (sums_K >> np.uint64(32))
    return int(np.dot(mixed_K, 2 * np.arange(len(sums_K), dtype=np.uint64) + np.uint64(1)))


def joined(rows: int, lanes: int) -> int:
    return rows % TOP << 64 | lanes % TOP


def compare(name: str, found: int, published: int | None) -> None:
    """Raises WeightsError when a tensor that was published with a checksum has another one."""
    if published is not None and found != published:
        raise WeightsError(
            f"weights {name}: checksum {found:032x}, the manifest says {published:032x}: it was altered, "
            "or written over by a later publication; publish the weights again"
        )
