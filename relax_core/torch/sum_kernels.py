"""Sums of words for checksums (see weight_sums.py) on a GPU, in one pass over the buffer: a kernel in Triton.

A program sums some rows of one tensor: each row, and their lanes. Sums wrap modulo 2**64, so their order does not
matter.

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
    words_RL: Tensor, first_P: Tensor, end_P: Tensor, begin: int, end: int, rows_R: Tensor, parts_PL: Tensor, span: int
) -> None:
    """Run the programs from ``begin`` to ``end``: each sums its rows, ``first_P`` to ``end_P``, into ``rows_R``, and
    their lanes into its own of ``parts_PL``. All are int64, contiguous. ``span``: rows of a program, at most.
    """
    with torch.cuda.device(words_RL.device):
        _sum[(end - begin,)](
            words_RL,
            first_P,
            end_P,
            begin,
            rows_R,
            parts_PL,
            LANES=words_RL.shape[1],
            SPAN=span,
            TILE=_TILE,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["begin"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    words, firsts, ends, begin, rows, parts, LANES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr
):
    program = (begin + tl.program_id(0)).to(tl.int64)
    first = tl.load(firsts + program)
    end = tl.load(ends + program)
    lane = tl.arange(0, LANES)
    total = tl.zeros([TILE, LANES], dtype=tl.int64)  # added up once, at the end: lanes meet across warps
    for step in range(0, SPAN, TILE):
        row = first + step + tl.arange(0, TILE)
        there = row < end
        tile = tl.load(words + row[:, None] * LANES + lane[None, :], mask=there[:, None], other=0)
        tl.store(rows + row, tl.sum(tile, axis=1), mask=there)
        total += tile
    tl.store(parts + program * LANES + lane, tl.sum(total, axis=0))
