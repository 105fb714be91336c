"""Checksums of published tensors: summed while a copy is still in the cache, or on the tensors' own device.

A tensor's bytes, with zeros up to a multiple of 8, are 64-bit words in rows of 512. The sum of each row and the sum of
each lane (column), modulo 2**64, are exact in any order. Each of the two lists v is summed with its positions,

    P(v) = sum over k of (2 k + 1) x (low 32 bits of v_k + M x high 32 bits of v_k)   mod 2**64

and the checksum is P(rows) x 2**64 + P(lanes). Any changed bit changes both. Elements that change places change the
rows' sums, or the lanes', or both, though their total stays.

Legend: W words, R rows, L lanes, N tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

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
_FACTOR = 0x9E3779B97F4A7C15
_TOP = 1 << 64


def checksum(tensor: Tensor) -> int:
    """The checksum of a tensor's bits, on its device; the result alone is copied to the host. Any dtype and layout."""
    import torch

    if tensor.device.type != "cpu":
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
    if buffer.device.type != "cpu":
        return _on_device(buffer, starts)
    sums = Sums(buffer, starts)
    sums.advance(starts[-1])
    return sums.found


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
                self.found.append(_joined(_positions(self._rows_R), _positions(self._lanes_L)))
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

    mixed_K = (sums_K & np.uint64(0xFFFFFFFF)) + np.uint64(_FACTOR) * (sums_K >> np.uint64(32))
    return int(np.dot(mixed_K, 2 * np.arange(len(sums_K), dtype=np.uint64) + np.uint64(1)))


def _joined(rows: int, lanes: int) -> int:
    return rows % _TOP << 64 | lanes % _TOP


def tensor_sums(tensors: Sequence[Tensor]) -> list[int]:
    """The checksums of N tensors, on the device on which all of them lie; the sums come to the host at once."""
    import torch
    from torch.nn.functional import pad

    words = []
    for tensor in tensors:
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        if data.numel() % ROW or data.data_ptr() % 8:
            data = pad(data, (0, -data.numel() % ROW))
        words.append(data.view(torch.int64).view(-1, LANES))
    if not words:
        return []
    rows_R = torch.cat([words_RL.sum(1) for words_RL in words])
    return _finished(rows_R, torch.stack([words_RL.sum(0) for words_RL in words]), [len(some) for some in words])


def _on_device(buffer: Tensor, starts: Sequence[int]) -> list[int]:
    import torch

    if len(starts) < 2:
        return []
    words_RL = buffer[: starts[-1]].view(torch.int64).view(-1, LANES)
    rows_N = [(end - start) // ROW for start, end in itertools.pairwise(starts)]
    return _finished(*_row_and_lane_sums(words_RL, rows_N), rows_N)


def _finished(rows_R: Tensor, lanes_NL: Tensor, rows_N: Sequence[int]) -> list[int]:
    """From the sums of all rows of N tensors, one after the other, and of their lanes; ``rows_N``: rows of each."""
    import torch

    device = rows_R.device
    found_N = (_mixed(lanes_NL) * (2 * torch.arange(LANES, device=device) + 1)).sum(1)
    ends_N = torch.tensor(rows_N).cumsum(0)
    firsts_N = torch.cat([ends_N.new_zeros(1), ends_N[:-1]]).to(device)
    # A weighted sum with positions from the first row of all, and what each tensor's own positions have less.
    mixed_R = _mixed(rows_R)
    both_2R = torch.stack([mixed_R * (2 * torch.arange(len(mixed_R), device=device) + 1), mixed_R])
    upto_2R = torch.cat([both_2R.new_zeros(2, 1), both_2R.cumsum(1)], 1)
    sums_2N = upto_2R[:, ends_N.to(device)] - upto_2R[:, firsts_N]
    return [
        _joined(rows, lanes)
        for rows, lanes in torch.stack([sums_2N[0] - 2 * firsts_N * sums_2N[1], found_N], 1).tolist()
    ]


def _row_and_lane_sums(words_RL: Tensor, rows_N: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(R,) and (N, L): one kernel where there is Triton, else two or three for each tensor."""
    import torch

    if words_RL.is_cuda and find_spec("triton") is not None:
        from relax_core.torch.sum_kernels import summed

        return summed(words_RL, rows_N)
    return words_RL.sum(1), torch.stack([some_RL.sum(0) for some_RL in torch.split(words_RL, list(rows_N))])


def _mixed(sums: Tensor) -> Tensor:
    return (sums & 0xFFFFFFFF) + (_FACTOR - _TOP) * (sums >> 32 & 0xFFFFFFFF)


def compare(name: str, found: int, published: int | None) -> None:
    """Raises WeightsError when a tensor that was published with a checksum has another one."""
    if published is not None and found != published:
        raise WeightsError(
            f"weights {name}: checksum {found:032x}, the manifest says {published:032x}: it was altered, "
            "or written over by a later publication; publish the weights again"
        )
