"""Sums of words for checksums (see weight_sums.py) on a GPU, in one pass over the buffer: a kernel in Triton.

A program sums some rows of one tensor, and their lanes. Sums wrap modulo 2**64, so their order does not matter.

Legend: R rows, L lanes, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 8
"""Rows that a program reads at once."""


def add(
    words_RL: Tensor, spans_3P: Tensor, begin: int, end: int, rows_P: Tensor, lanes_PL: Tensor, span: int, factor: int
) -> None:
    """Run the programs from ``begin`` to ``end``. All tensors are int64, contiguous.

    ``spans_3P``: the first row of each, the one behind its last, and the first of its tensor; at most ``span`` rows
    each. ``rows_P`` gets the sum of the row sums with their positions (``P(v)`` with the factor M), ``lanes_PL`` the
    sums of the lanes.
    """
    with torch.cuda.device(words_RL.device):
        _sum[(end - begin,)](
            words_RL,
            *spans_3P,
            begin,
            rows_P,
            lanes_PL,
            FACTOR=factor,
            LANES=words_RL.shape[1],
            SPAN=span,
            TILE=_TILE,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["begin"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    words,
    firsts,
    ends,
    bases,
    begin,
    rows,
    lanes,
    FACTOR: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    program = (begin + tl.program_id(0)).to(tl.int64)
    first = tl.load(firsts + program)
    end = tl.load(ends + program)
    base = tl.load(bases + program)
    lane = tl.arange(0, LANES)
    total = tl.zeros([TILE, LANES], dtype=tl.int64)  # added up once, at the end: lanes meet across warps
    weighted = tl.zeros([TILE], dtype=tl.int64)
    for step in range(0, SPAN, TILE):
        row = first + step + tl.arange(0, TILE)
        there = row < end
        tile = tl.load(words + row[:, None] * LANES + lane[None, :], mask=there[:, None], other=0)
        sums = tl.sum(tile, axis=1)
        weighted += (2 * (row - base) + 1) * ((sums & 0xFFFFFFFF) + FACTOR * ((sums >> 32) & 0xFFFFFFFF))
        total += tile
    tl.store(rows + program, tl.sum(weighted, axis=0))
    tl.store(lanes + program * LANES + lane, tl.sum(total, axis=0))
