"""Log-probs, entropy and their gradient on a GPU, each in one pass over the logits: kernels in Triton.

The formulas are those of logprobs.py, which does the same with tensor operations where there is no Triton. A kernel's
program works on one row of logits, blocks of the vocabulary after each other, in float32.

Legend: M tokens, K given ids of a token, V vocabulary.
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
    of_logprobs_M: Tensor,
    pull_M: Tensor,
    of_entropy_M: Tensor | None,
    into_MV: Tensor,
    of_all_MV: Tensor | None = None,
) -> None:
    """Write the gradient of the logits; ``into_MV`` may be the logits.

    ``of_logprobs_M``: that of the tokens' log-probs. ``pull_M``: the sum of those of all log-probs of a row, each of
    which pulls down every probability. ``of_entropy_M``: that of the entropies, or None. ``of_all_MV``: that of the
    whole vocabulary's log-probs.
    """
    rows, vocab = logits_MV.shape
    _gradient[(rows,)](
        logits_MV, target_M, banned_V, norm_M, entropy_M, of_logprobs_M, pull_M, of_entropy_M, of_all_MV, into_MV,
        vocab, logits_MV.stride(0), into_MV.stride(0), 0 if of_all_MV is None else of_all_MV.stride(0), temperature,
        HAS_BANNED=banned_V is not None, ENTROPY=of_entropy_M is not None, ALL=of_all_MV is not None,
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
    logits, targets, banned, norms, entropies, of_logprobs, pulls, of_entropies, of_all, into, vocab, stride,
    into_stride, all_stride, temperature,
    HAS_BANNED: tl.constexpr, ENTROPY: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
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
        made = tl.where(places == target, tl.load(of_logprobs + row), 0.0) - tl.load(pulls + row) * share
        if ALL:
            made += tl.load(of_all + row * all_stride + places, mask=inside, other=0.0)
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
    """Log-probs (M,), entropies (M,) and log-probs of given ids (M, K) of logits; None for what is not asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_MV: Tensor,
        target_M: Tensor,
        ids_MK: Tensor | None,
        banned_V: Tensor | None,
        temperature: float,
        entropy: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``overwrite``: whether the gradient may be written over the logits."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.overwrite = temperature, overwrite
        logprobs_M, norm_M, entropy_M = measure(logits_MV, target_M, banned_V, temperature, entropy)
        ctx.save_for_backward(logits_MV, target_M, ids_MK, banned_V, norm_M, entropy_M)
        topk_MK = None
        if ids_MK is not None:
            topk_MK = logits_MV.gather(-1, ids_MK).float() / temperature
            if banned_V is not None:
                topk_MK = topk_MK.masked_fill(banned_V[ids_MK] > 0, BANNED)
            topk_MK = topk_MK - norm_M[:, None]
        return logprobs_M, entropy_M if entropy else None, topk_MK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * 7
        logits_MV, target_M, ids_MK, banned_V, norm_M, entropy_M = ctx.saved_tensors
        of_logprobs_M, of_entropy_M, of_topk_MK = (None if x is None else x.contiguous() for x in gradients)
        if of_logprobs_M is None:
            of_logprobs_M = torch.zeros_like(norm_M)
        pull_M = of_logprobs_M if of_topk_MK is None else of_logprobs_M + of_topk_MK.sum(-1)
        into_MV = logits_MV.detach() if ctx.overwrite else torch.empty_like(logits_MV)
        measured = (logits_MV, target_M, banned_V, ctx.temperature, norm_M, entropy_M)
        write_gradient(*measured, of_logprobs_M, pull_M, of_entropy_M, into_MV)
        if of_topk_MK is not None:
            raised_MK = of_topk_MK / ctx.temperature
            if banned_V is not None:
                raised_MK = raised_MK.masked_fill(banned_V[ids_MK] > 0, 0.0)
            into_MV.scatter_add_(-1, ids_MK, raised_MK.to(into_MV.dtype))
        return into_MV, None, None, None, None, None, None
