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


@dataclass(frozen=True, eq=False)
class Plan:
    """What depends on the tensors' sizes alone. It is made once: copies to a device wait for all that it has to do."""

    rows_N: tuple[int, ...]
    firsts_N: Tensor
    """The first row of each tensor, and (``ends_N``) the one behind its last; int64, on the device."""
    ends_N: Tensor
    owner_P: Tensor
    """The tensor of each program, int64; then its first row and the one behind its last."""
    first_P: Tensor
    end_P: Tensor
    host_end_P: np.ndarray[tuple[int], np.dtype[np.int64]]

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, rows_N: tuple[int, ...], device: torch.device) -> Self:
        count_N = np.asarray(rows_N, np.int64)
        ends_N = count_N.cumsum()
        programs_N = -(-count_N // SPAN)
        owner_P = np.repeat(np.arange(len(count_N)), programs_N)
        place_P = np.arange(len(owner_P)) - (programs_N.cumsum() - programs_N)[owner_P]  # among its tensor's programs
        first_P = (ends_N - count_N)[owner_P] + place_P * SPAN
        end_P = np.minimum(first_P + SPAN, ends_N[owner_P])
        host = (ends_N - count_N, ends_N, owner_P, first_P, end_P)
        firsts, ends, owner, first, end = (torch.from_numpy(some).to(device) for some in host)
        return cls(rows_N, firsts, ends, owner, first, end, end_P)


class DeviceSums:
    """Sums a buffer (uint8) of N tensors as it fills; ``starts`` are N + 1 offsets, multiples of ``ROW``.

    With Triton ``advance`` starts a kernel over what has become complete, which works beside whatever fills the rest.
    """

    def __init__(self, buffer: Tensor, starts: Sequence[int]) -> None:
        rows_N = tuple((end - start) // ROW for start, end in itertools.pairwise(starts))
        self._words_RL = buffer[: starts[-1]].view(torch.int64).view(-1, LANES)
        self._plan = Plan.of(rows_N, buffer.device)
        self._by_kernel = buffer.is_cuda and _has_triton()
        self._done = 0
        if self._by_kernel:
            self._rows_R = self._words_RL.new_empty(len(self._words_RL))
            self._parts_PL = self._words_RL.new_empty(len(self._plan.owner_P), LANES)

    def advance(self, upto: int) -> None:
        """The buffer holds its first ``upto`` bytes now."""
        if not self._by_kernel:
            return
        done = int(np.searchsorted(self._plan.host_end_P, upto // ROW, side="right"))
        if done > self._done:
            from relax_core.torch.sum_kernels import add

            plan = self._plan
            add(self._words_RL, plan.first_P, plan.end_P, self._done, done, self._rows_R, self._parts_PL, SPAN)
            self._done = done

    @property
    def found(self) -> list[int]:
        """The sums of all tensors, which must be complete."""
        plan = self._plan
        if not plan.rows_N:
            return []
        if self._by_kernel:
            assert self._done == len(plan.owner_P)
            rows_R = self._rows_R
            lanes_NL = rows_R.new_zeros(len(plan.rows_N), LANES).index_add_(0, plan.owner_P, self._parts_PL)
        else:
            rows_R = self._words_RL.sum(1)
            parts = torch.split(self._words_RL, list(plan.rows_N))
            lanes_NL = torch.stack([some_RL.sum(0) for some_RL in parts])
        return _finished(rows_R, lanes_NL, plan)


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
    if not words:
        return []
    rows_R = torch.cat([words_RL.sum(1) for words_RL in words])
    lanes_NL = torch.stack([words_RL.sum(0) for words_RL in words])
    return _finished(rows_R, lanes_NL, Plan.of(tuple(len(some) for some in words), rows_R.device))


def _finished(rows_R: Tensor, lanes_NL: Tensor, plan: Plan) -> list[int]:
    """The checksums, from the sums of all rows of N tensors, one after the other, and of their lanes."""
    device = rows_R.device
    found_N = (_mixed(lanes_NL) * (2 * torch.arange(LANES, device=device) + 1)).sum(1)
    # A weighted sum with positions from the first row of all, and what each tensor's own positions have less.
    mixed_R = _mixed(rows_R)
    both_2R = torch.stack([mixed_R * (2 * torch.arange(len(mixed_R), device=device) + 1), mixed_R])
    upto_2R = torch.cat([both_2R.new_zeros(2, 1), both_2R.cumsum(1)], 1)
    sums_2N = upto_2R[:, plan.ends_N] - upto_2R[:, plan.firsts_N]
    return [
        joined(rows, lanes)
        for rows, lanes in torch.stack([sums_2N[0] - 2 * plan.firsts_N * sums_2N[1], found_N], 1).tolist()
    ]


def _mixed(sums: Tensor) -> Tensor:
    return (sums & 0xFFFFFFFF) + (FACTOR - TOP) * (sums >> 32 & 0xFFFFFFFF)
