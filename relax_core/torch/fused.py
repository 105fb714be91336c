"""Log-probs, entropy and their gradient on a GPU, each in one pass over the logits: kernels in Triton.

The formulas are those of logprobs.py, which does the same with tensor operations where there is no Triton. A kernel's
program works on one row of logits, blocks of the vocabulary after each other, in float32.

Legend: M tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from relax_core.torch.sampling import BANNED

_BLOCK = 4096
_WARPS = 8
_BAN = tl.constexpr(BANNED)


def measure(
    logits_MV: Tensor, target_M: Tensor, banned_V: Tensor | None, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the tokens, the log of each row's sum of exponentials, and the entropies (empty if not asked for).

    ``banned_V``: uint8, 1 for tokens that take no part; None: all do. All results float32 (M,).
    """
    rows, vocab = logits_MV.shape
    logprobs_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    norm_M = torch.empty_like(logprobs_M)
    entropy_M = torch.empty_like(logprobs_M) if entropy else logprobs_M.new_empty(0)
    _measure[(rows,)](
        logits_MV, target_M, banned_V, logprobs_M, norm_M, entropy_M, vocab, logits_MV.stride(0), temperature,
        HAS_BANNED=banned_V is not None, ENTROPY=entropy, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return logprobs_M, norm_M, entropy_M


def write_gradient(
    logits_MV: Tensor,
    target_M: Tensor,
    banned_V: Tensor | None,
    temperature: float,
    norm_M: Tensor,
    entropy_M: Tensor,
    gradients: tuple[Tensor | None, Tensor | None],
    into_MV: Tensor,
) -> None:
    """Write the gradient of the logits; ``into_MV`` may be the logits. ``gradients``: of log-probs and of entropies."""
    of_logprobs_M, of_entropy_M = (None if x is None else x.contiguous() for x in gradients)
    rows, vocab = logits_MV.shape
    _gradient[(rows,)](
        logits_MV, target_M, banned_V, norm_M, entropy_M, of_logprobs_M, of_entropy_M, into_MV, vocab,
        logits_MV.stride(0), into_MV.stride(0), temperature,
        HAS_BANNED=banned_V is not None, LOGPROBS=of_logprobs_M is not None, ENTROPY=of_entropy_M is not None,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    logits, targets, banned, logprobs, norms, entropies, vocab, stride, temperature,
    HAS_BANNED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    highest = -float("inf")
    total = 0.0  # sum of exp(x - highest)
    weighted = 0.0  # sum of exp(x - highest) x
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < vocab
        x = tl.load(start + places, mask=inside, other=0.0).to(tl.float32) / temperature
        if HAS_BANNED:
            x = tl.where(tl.load(banned + places, mask=inside, other=0) != 0, _BAN, x)
        x = tl.where(inside, x, -float("inf"))
        new = tl.maximum(highest, tl.max(x, 0))
        shrink = tl.exp(highest - new)
        share = tl.exp(x - new)
        total = total * shrink + tl.sum(share, 0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(share > 0, share * x, 0.0), 0)
        highest = new
    norm = highest + tl.log(total)
    target = tl.load(targets + row)
    chosen = tl.load(start + target).to(tl.float32) / temperature
    if HAS_BANNED:
        chosen = tl.where(tl.load(banned + target) != 0, _BAN, chosen)
    tl.store(logprobs + row, chosen - norm)
    tl.store(norms + row, norm)
    if ENTROPY:
        tl.store(entropies + row, norm - weighted / total)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits, targets, banned, norms, entropies, of_logprobs, of_entropies, into, vocab, stride, into_stride, temperature,
    HAS_BANNED: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    norm = tl.load(norms + row)
    target = tl.load(targets + row)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < vocab
        x = tl.load(start + places, mask=inside, other=0.0).to(tl.float32) / temperature
        ban = places < 0
        if HAS_BANNED:
            ban = tl.load(banned + places, mask=inside, other=0) != 0
            x = tl.where(ban, _BAN, x)
        x = x - norm
        share = tl.exp(x)
        made = tl.zeros([BLOCK], tl.float32)
        if LOGPROBS:
            made += tl.load(of_logprobs + row) * (tl.where(places == target, 1.0, 0.0) - share)
        if ENTROPY:
            made -= tl.load(of_entropies + row) * share * (x + tl.load(entropies + row))
        made = tl.where(ban, 0.0, made / temperature)
        tl.store(into + row * into_stride + places, made.to(into.dtype.element_ty), mask=inside)


def banned_mask(banned: Tensor | None, vocab: int) -> Tensor | None:
    """The mask of banned ids, uint8 (V,); None where there is none."""
    if banned is None or not len(banned):
        return None
    mask_V = torch.zeros(vocab, dtype=torch.uint8, device=banned.device)
    mask_V[banned] = 1
    return mask_V


class Fused(torch.autograd.Function):
    """Log-probs (M,) and, if asked for, entropies (M,) of logits; else None in their place."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_MV: Tensor,
        target_M: Tensor,
        banned_V: Tensor | None,
        temperature: float,
        entropy: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """``overwrite``: whether the gradient may be written over the logits."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.overwrite = temperature, overwrite
        logprobs_M, norm_M, entropy_M = measure(logits_MV, target_M, banned_V, temperature, entropy)
        ctx.save_for_backward(logits_MV, target_M, banned_V, norm_M, entropy_M)
        return logprobs_M, entropy_M if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * 6
        logits_MV, target_M, banned_V, norm_M, entropy_M = ctx.saved_tensors
        into_MV = logits_MV.detach() if ctx.overwrite else torch.empty_like(logits_MV)
        of = (gradients[0], gradients[1])
        write_gradient(logits_MV, target_M, banned_V, ctx.temperature, norm_M, entropy_M, of, into_MV)
        return into_MV, None, None, None, None, None
