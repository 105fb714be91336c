"""Checksums of published tensors (see weight_sums.py) on their own device, where only the results leave it.

Legend: W words, R rows, L lanes, N tensors, P programs of the GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from relax_core.weight_sums import FACTOR, LANES, ROW, TOP, joined

SPAN = 256
"""Rows that a program sums, at most."""
_FACTOR = FACTOR - TOP
"""As a signed number."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Which program sums what: it depends on the tensors' sizes alone. It is made once, since whatever is copied to a
    device waits for all that this has to do."""

    rows_N: tuple[int, ...]
    owner_P: Tensor
    """The tensor of each program; int64, on the device."""
    spans_3P: Tensor
    """The first row of each, the one behind its last, and the first of its tensor; int64, on the device."""
    host_end_P: np.ndarray[tuple[int], np.dtype[np.int64]]
    """The second of them."""

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, rows_N: tuple[int, ...], device: torch.device) -> Self:
        count_N = np.asarray(rows_N, np.int64)
        behind_N = count_N.cumsum()
        programs_N = -(-count_N // SPAN)
        owner_P = np.repeat(np.arange(len(count_N)), programs_N)
        place_P = np.arange(len(owner_P)) - (programs_N.cumsum() - programs_N)[owner_P]  # among its tensor's programs
        base_P = (behind_N - count_N)[owner_P]
        first_P = base_P + place_P * SPAN
        end_P = np.minimum(first_P + SPAN, behind_N[owner_P])
        spans_3P = torch.from_numpy(np.stack([first_P, end_P, base_P])).to(device)
        return cls(rows_N, torch.from_numpy(owner_P).to(device), spans_3P, end_P)


class DeviceSums:
    """Sums a buffer (uint8) of N tensors as it fills; ``starts`` are N + 1 offsets, multiples of ``ROW``.

    With Triton ``advance`` starts a kernel over what has become complete, which works beside whatever fills the rest.
    """

    def __init__(self, buffer: Tensor, starts: Sequence[int]) -> None:
        self._rows_N = tuple((end - start) // ROW for start, end in itertools.pairwise(starts))
        self._words_RL = buffer[: starts[-1]].view(torch.int64).view(-1, LANES)
        self._kernel = _Kernel(self._words_RL, self._rows_N) if buffer.is_cuda and _has_triton() else None

    def advance(self, upto: int) -> None:
        """The buffer holds its first ``upto`` bytes now."""
        if self._kernel is not None:
            self._kernel.advance(upto // ROW)

    @property
    def found(self) -> list[int]:
        """The sums of all tensors, which must be complete."""
        if self._kernel is not None:
            return self._kernel.found()
        return _sums(torch.split(self._words_RL, list(self._rows_N)) if self._rows_N else [])


class _Kernel:
    """The programs of Triton's kernel: which of them have run, and what they found."""

    def __init__(self, words_RL: Tensor, rows_N: tuple[int, ...]) -> None:
        self.words_RL, self.plan, self.done = words_RL, Plan.of(rows_N, words_RL.device), 0
        self.rows_P = words_RL.new_empty(len(self.plan.owner_P))
        self.lanes_PL = words_RL.new_empty(len(self.plan.owner_P), LANES)

    def advance(self, rows: int) -> None:
        from relax_core.torch.sum_kernels import add

        end = int(np.searchsorted(self.plan.host_end_P, rows, side="right"))
        if end > self.done:
            spans_3P = self.plan.spans_3P
            add(self.words_RL, spans_3P, self.done, end, self.rows_P, self.lanes_PL, SPAN, _FACTOR)
            self.done = end

    def found(self) -> list[int]:
        assert self.done == len(self.plan.owner_P)
        count = len(self.plan.rows_N)
        rows_N = self.rows_P.new_zeros(count).index_add_(0, self.plan.owner_P, self.rows_P)
        lanes_NL = self.rows_P.new_zeros(count, LANES).index_add_(0, self.plan.owner_P, self.lanes_PL)
        return _joined(rows_N, _positions(lanes_NL))


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def tensor_sums(tensors: Sequence[Tensor]) -> list[int]:
    """The checksums of N tensors, on the device on which all of them lie; the sums come to the host at once."""
    words = []
    for tensor in tensors:
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        if data.numel() % ROW or data.data_ptr() % 8:
            data = pad(data, (0, -data.numel() % ROW))
        words.append(data.view(torch.int64).view(-1, LANES))
    return _sums(words)


def _sums(words: Sequence[Tensor]) -> list[int]:
    """Of N tensors' words (R, L), by torch's own operations: few for each tensor, since each is a kernel."""
    if not words:
        return []
    lanes_NL = torch.stack([words_RL.sum(0) for words_RL in words])
    mixed_R = _mixed(torch.cat([words_RL.sum(1) for words_RL in words]))
    # Sums with positions from the first row of all, and what each tensor's own positions have less.
    ends = list(itertools.accumulate((len(words_RL) for words_RL in words), initial=0))
    ends_N = torch.tensor(ends, device=mixed_R.device)
    weighted_R = mixed_R * (2 * torch.arange(len(mixed_R), device=mixed_R.device) + 1)
    upto_R, plain_R = (pad(some_R.cumsum(0), (1, 0)) for some_R in (weighted_R, mixed_R))
    rows_N = upto_R[ends_N].diff() - 2 * ends_N[:-1] * plain_R[ends_N].diff()
    return _joined(rows_N, _positions(lanes_NL))


def _positions(sums_NK: Tensor) -> Tensor:
    """``P(v)`` of each list of sums."""
    return (_mixed(sums_NK) * (2 * torch.arange(sums_NK.shape[1], device=sums_NK.device) + 1)).sum(1)


def _mixed(sums: Tensor) -> Tensor:
    return (sums & 0xFFFFFFFF) + _FACTOR * (sums >> 32 & 0xFFFFFFFF)


def _joined(rows_N: Tensor, lanes_N: Tensor) -> list[int]:
    return [joined(rows, lanes) for rows, lanes in torch.stack([rows_N, lanes_N], 1).tolist()]
