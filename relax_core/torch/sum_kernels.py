"""Sums of words for checksums (see weight_sums.py) on a GPU, in one pass over the buffer: a kernel in Triton.

A program sums up to ``_SPAN`` rows of one tensor: each row, and their lanes. Sums wrap modulo 2**64, so their order
does not matter.

Legend: R rows, L lanes, N tensors, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_SPAN = 64
_TILE = 8
"""Rows that a program reads at once."""


def summed(words_RL: Tensor, rows_N: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The sums of all rows (R,), and of the lanes of each tensor (N, L), int64.

    ``words_RL``: int64, contiguous, of N tensors one after the other; ``rows_N``: how many rows each has.
    """
    count_N = np.asarray(rows_N, np.int64)
    programs_N = -(-count_N // _SPAN)
    owner_P = np.repeat(np.arange(len(count_N)), programs_N)
    place_P = np.arange(len(owner_P)) - (programs_N.cumsum() - programs_N)[owner_P]  # among its tensor's programs
    first_P = (count_N.cumsum() - count_N)[owner_P] + place_P * _SPAN
    end_P = np.minimum(first_P + _SPAN, count_N.cumsum()[owner_P])
    table_3P = torch.from_numpy(np.stack([owner_P, first_P, end_P])).to(words_RL.device)
    lanes = words_RL.shape[1]
    rows_R = torch.empty(len(words_RL), dtype=torch.int64, device=words_RL.device)
    parts_PL = torch.empty(len(owner_P), lanes, dtype=torch.int64, device=words_RL.device)
    if len(owner_P):
        with torch.cuda.device(words_RL.device):
            _sum[(len(owner_P),)](
                words_RL, table_3P[1], table_3P[2], rows_R, parts_PL, LANES=lanes, SPAN=_SPAN, TILE=_TILE, num_warps=8
            )
    lanes_NL = parts_PL.new_zeros(len(count_N), lanes).index_add_(0, table_3P[0], parts_PL)
    return rows_R, lanes_NL


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    words, firsts, ends, rows, parts, LANES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts + program)
    end = tl.load(ends + program)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=tl.int64)
    for step in range(0, SPAN, TILE):
        row = first + step + tl.arange(0, TILE)
        there = row < end
        tile = tl.load(words + row[:, None] * LANES + lane[None, :], mask=there[:, None], other=0)
        tl.store(rows + row, tl.sum(tile, axis=1), mask=there)
        total += tl.sum(tile, axis=0)
    tl.store(parts + program * LANES + lane, total)
