"""Divergences and their gradient on a GPU, each in one pass over both distributions: kernels in Triton.

The formulas are those of divergence.py, which does the same with tensor operations where there is no Triton. A kernel's
program works on one token, blocks of the vocabulary after each other.

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8
_KINDS = {"reverse": 0, "forward": 1, "jsd": 2}


def distances(
    kind: str, student_NV: Tensor, teacher_NV: Tensor, beta: float, mask_N: Tensor | None, floor: float
) -> tuple[Tensor, Tensor]:
    """The divergence and the reverse one of each token (N,), float32; 0 where the mask, bool (N,), is False."""
    found_N = torch.empty(len(student_NV), dtype=torch.float32, device=student_NV.device)
    against_N = torch.empty_like(found_N)
    _distances[(len(student_NV),)](
        student_NV, teacher_NV, mask_N, found_N, against_N, student_NV.shape[1], *_shares(beta), floor,
        KIND=_KINDS[kind], MASKED=mask_N is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return found_N, against_N


def slope(
    kind: str,
    student_NV: Tensor,
    teacher_NV: Tensor,
    beta: float,
    mask_N: Tensor | None,
    floor: float,
    gradient_N: Tensor,
) -> Tensor:
    """``gradient_N`` times the derivative of each token's divergence by the student's log-probs (N, V)."""
    into_NV = torch.empty_like(student_NV)
    _slope[(len(student_NV),)](
        student_NV, teacher_NV, mask_N, gradient_N, into_NV, student_NV.shape[1], *_shares(beta), floor,
        KIND=_KINDS[kind], MASKED=mask_N is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return into_NV


def _shares(beta: float) -> tuple[float, float, float]:
    """beta, and the logs of what teacher and student have in the mixture."""
    return float(beta), math.log(beta), math.log1p(-beta)


@triton.jit
def _mixture(s, t, of_teacher, of_student, floor):  # type: ignore[no-untyped-def]
    s = s + of_student
    t = t + of_teacher
    high = tl.maximum(s, t)
    return tl.maximum(high + tl.log(tl.exp(s - high) + tl.exp(t - high)), floor)


@triton.jit  # type: ignore[untyped-decorator]
def _distances(  # type: ignore[no-untyped-def]
    students, teachers, mask, found, against, vocab, beta, of_teacher, of_student, floor,
    KIND: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts = True
    if MASKED:
        counts = tl.load(mask + row) != 0
    total = 0.0
    back = 0.0
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = (places < vocab) & counts
        s = tl.maximum(tl.load(students + row * vocab + places, mask=inside, other=floor).to(tl.float32), floor)
        t = tl.maximum(tl.load(teachers + row * vocab + places, mask=inside, other=floor).to(tl.float32), floor)
        p = tl.exp(s)
        back += tl.sum(p * (s - t), 0)
        if KIND == 1:
            total += tl.sum(tl.exp(t) * (t - s), 0)
        if KIND == 2:
            m = _mixture(s, t, of_teacher, of_student, floor)
            total += tl.sum(beta * tl.exp(t) * (t - m) + (1 - beta) * p * (s - m), 0)
    if KIND == 0:
        total = back
    tl.store(found + row, total)
    tl.store(against + row, back)


@triton.jit  # type: ignore[untyped-decorator]
def _slope(  # type: ignore[no-untyped-def]
    students, teachers, mask, gradients, into, vocab, beta, of_teacher, of_student, floor,
    KIND: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts = True
    if MASKED:
        counts = tl.load(mask + row) != 0
    scale = tl.load(gradients + row)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < vocab
        raw = tl.load(students + row * vocab + places, mask=inside & counts, other=floor).to(tl.float32)
        s = tl.maximum(raw, floor)
        t = tl.maximum(
            tl.load(teachers + row * vocab + places, mask=inside & counts, other=floor).to(tl.float32), floor
        )
        if KIND == 0:
            made = (s - t + 1) * tl.exp(s)
        elif KIND == 1:
            made = tl.where(raw < floor, 0.0, -tl.exp(t))  # the floor has no slope
        else:
            made = (1 - beta) * (s - _mixture(s, t, of_teacher, of_student, floor)) * tl.exp(s)
        made = tl.where(counts, made * scale, 0.0)
        tl.store(into + row * vocab + places, made.to(into.dtype.element_ty), mask=inside)
