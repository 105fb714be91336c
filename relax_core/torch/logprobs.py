"""Log-probs of given tokens, entropy and the like from hidden states and a head, without all logits at once.

Tokens are taken in chunks. The logits of as many chunks as ``Limits.kept`` allows stay until the backward pass; those
of the others are made again there. Besides a chunk's logits (m, V) nothing of that size is made: statistics are found
block by block, and the gradient of the logits is written over them. What is kept, and how big blocks are, changes no
bit: each token's numbers come from its own logits alone.

Legend: M tokens, m of a chunk, n of a block, H hidden size, K given ids of a token, V vocabulary. Statistics are
float32, whatever the head's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from relax_core.torch.sampling import BANNED

Head = Callable[[Tensor], Tensor]
"""Hidden states (m, H) -> logits (m, V) of any float dtype, each token for itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may exist at once on a device."""

    chunk: int
    """Elements of logits (m, V) that the head makes at once. Each chunk adds to the gradient of the head's weights
    (V, H), which takes as long as some hundred tokens do: a chunk must hold many more."""
    block: int
    """Elements (n, V) that become probabilities at once; on a CPU for each of its threads, to stay in their caches."""
    kept: int
    """Bytes of logits that stay from the forward pass to the backward pass instead of being made again."""
    plain: int = 0
    """Elements of all logits (M, V) up to which autograd does it alone: of few it is faster, and what it holds is
    little."""


_LIMITS = {"cpu": Limits(chunk=1 << 26, block=1 << 18, kept=1 << 30, plain=1 << 20)}
_GPU = Limits(chunk=1 << 28, block=1 << 24, kept=1 << 33, plain=1 << 24)

_FRESH = frozenset(f"{name}Backward0" for name in ("Mm", "Addmm", "UnsafeView", "Add", "Mul", "Div", "ToCopy"))
"""Operations whose result is a tensor of its own that their backward pass does not use: it may be overwritten."""


def limits_of(device: torch.device) -> Limits:
    """The defaults for a device. They depend on its type only, so that equal work gives equal bits."""
    return _LIMITS.get(device.type, _GPU)


class Statistics(NamedTuple):
    """Of M tokens, float32; None: not asked for."""

    logprobs_M: Tensor
    entropy_M: Tensor | None = None
    topk_logprobs_MK: Tensor | None = None
    full_logprobs_MV: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The distribution, which is the one that the engine samples from, and what of it besides the tokens' log-probs."""

    temperature: float = 1.0
    banned: Tensor | None = None
    """int64: ids of tokens that are never sampled; None or empty: there are none."""
    entropy: bool = False
    full: bool = False
    """Log-probs of the whole vocabulary, which are as big as all logits."""


def statistics(
    head: Head,
    hidden_MH: Tensor,
    target_M: Tensor,
    vocab_size: int,
    asked: Asked,
    ids_MK: Tensor | None = None,
    limits: Limits | None = None,
) -> Statistics:
    """Of the tempered distribution without banned tokens, with gradient for hidden states and the head's parameters.

    ``target_M``: int64, the tokens. ``ids_MK``: int64, further ids whose log-probs are asked for. One backward pass is
    possible; a second one through the same statistics raises RuntimeError where the first overwrote the logits.
    """
    limits = limits or limits_of(hidden_MH.device)
    if len(target_M) * vocab_size <= limits.plain:
        return _plain(head(hidden_MH), target_M, ids_MK, asked)
    size = max(1, limits.chunk // (4 if asked.full else 1) // vocab_size)  # it comes on top of two that hold all tokens
    hidden, target = torch.split(hidden_MH, size), torch.split(target_M, size)
    ids: Sequence[Tensor | None] = [None] * len(target) if ids_MK is None else torch.split(ids_MK, size)
    everything = _Everything(len(target_M)) if asked.full else None
    again = 0
    if torch.is_grad_enabled() and not asked.full:
        again = _made_again([vocab_size * len(x) * x.element_size() for x in hidden], limits.kept)
    made = []
    for i, hidden_mH in enumerate(hidden):
        work = _Work(asked, limits.block, target[i], ids[i], i * size, everything)
        if i < again:
            made.append(checkpoint(_chunk, head, hidden_mH, work, use_reentrant=False, preserve_rng_state=False))
        else:
            made.append(_chunk(head, hidden_mH, work))
    found = list(zip(*made, strict=True))
    logprobs_M, entropy_M, topk_MK = (_in_line(parts) for parts in found[:3])
    assert logprobs_M is not None
    full_MV = None if everything is None else _Joined.apply(everything, *found[3])  # type: ignore[no-untyped-call]
    return Statistics(logprobs_M, entropy_M, topk_MK, full_MV)


def _plain(logits_MV: Tensor, target_M: Tensor, ids_MK: Tensor | None, asked: Asked) -> Statistics:
    """The same by autograd alone."""
    logits_MV = _tempered(logits_MV.float(), asked)
    if ids_MK is None and not asked.entropy and not asked.full:
        return Statistics(-cross_entropy(logits_MV, target_M, reduction="none"))
    all_MV = logits_MV.log_softmax(-1)
    return Statistics(
        all_MV.gather(-1, target_M[:, None])[:, 0],
        -(all_MV.exp() * all_MV).sum(-1) if asked.entropy else None,
        None if ids_MK is None else all_MV.gather(-1, ids_MK),
        all_MV if asked.full else None,
    )


def _in_line(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if len(there) > 1 else there[0] if there else None


def _made_again(sizes: Sequence[int], kept: int) -> int:
    """How many chunks, the first ones, are not kept: the backward pass begins with the last, and then frees it."""
    total = 0
    for i in reversed(range(len(sizes))):
        total += sizes[i]
        if total > kept:
            return i + 1
    return 0


# --- a chunk ----------------------------------------------------------------------------------------------------------


class _Everything:
    """Log-probs of the whole vocabulary, as each chunk writes its own: joined later they would exist twice."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.MV: Tensor | None = None

    def part(self, start: int, logits_mV: Tensor) -> Tensor:
        """Where the chunk that starts at this token writes. Without a tie to the graph, which would be a cycle."""
        if self.MV is None:
            self.MV = logits_mV.new_empty(self.tokens, logits_mV.shape[1], dtype=torch.float32)
        return self.MV.data[start : start + len(logits_mV)]


@dataclass(slots=True)
class _Work:
    """A chunk's share of what is asked for."""

    asked: Asked
    block: int
    target_m: Tensor
    ids_mK: Tensor | None
    start: int
    everything: _Everything | None
    measured: bool = False
    """Then its logits are made again, and nothing else matters."""


def _chunk(head: Head, hidden_mH: Tensor, work: _Work) -> tuple[Tensor | None, ...]:
    logits_mV = head(hidden_mH)
    if work.everything is None and _has_kernels(logits_mV):
        return _fused(logits_mV, work)
    found: tuple[Tensor | None, ...] = _Statistics.apply(logits_mV, work)  # type: ignore[no-untyped-call]
    return found


def _has_kernels(logits_mV: Tensor) -> bool:
    return logits_mV.is_cuda and logits_mV.stride(1) == 1 and find_spec("triton") is not None


def _fused(logits_mV: Tensor, work: _Work) -> tuple[Tensor | None, ...]:
    """All but the whole vocabulary's log-probs, by kernels that read the logits once."""
    from relax_core.torch.fused import Fused, banned_mask

    asked = work.asked
    banned_V = banned_mask(asked.banned, logits_mV.shape[1])
    settings = (float(asked.temperature), asked.entropy, type(logits_mV.grad_fn).__name__ in _FRESH)
    found = Fused.apply(logits_mV, work.target_m, work.ids_mK, banned_V, *settings)  # type: ignore[no-untyped-call]
    return *found, None


def _fused_gradient_of_all(
    all_mV: Tensor, work: _Work, g_m: Tensor | None, g_mV: Tensor | None, into_mV: Tensor
) -> None:
    """Write the gradient of a chunk's logits, given its log-probs and the gradients of some and of all of them."""
    from relax_core.torch.fused import banned_mask, write_gradient

    heat = work.asked.temperature
    g_m, g_mV = (None if x is None else (x if heat == 1 else x / heat).contiguous() for x in (g_m, g_mV))
    nothing_m = all_mV.new_zeros(len(all_mV))
    g_m = nothing_m if g_m is None else g_m
    pull_m = g_m if g_mV is None else g_m + g_mV.sum(-1)
    banned_V = banned_mask(work.asked.banned, all_mV.shape[1])
    write_gradient(all_mV, work.target_m, banned_V, 1.0, nothing_m, nothing_m, g_m, pull_m, None, into_mV, g_mV)


class _Statistics(torch.autograd.Function):
    """Statistics of logits block by block, and the gradient of the logits, written over them where that is safe.

    Log-probs of the whole vocabulary are not among the outputs, but a stand-in of their shape that takes no memory.
    """

    @staticmethod
    def forward(ctx: Any, logits_mV: Tensor, work: _Work) -> tuple[Tensor | None, ...]:
        m, vocab = logits_mV.shape
        ctx.fresh = type(logits_mV.grad_fn).__name__ in _FRESH
        ctx.set_materialize_grads(False)
        ctx.work, ctx.dtype = work, logits_mV.dtype
        ctx.all_mV = None if work.everything is None else work.everything.part(work.start, logits_mV)
        if work.everything is None:
            ctx.save_for_backward(logits_mV)
        logprobs_m = logits_mV.new_empty(m, dtype=torch.float32)
        entropy_m = torch.empty_like(logprobs_m) if work.asked.entropy else None
        topk_mK = None if work.ids_mK is None else logprobs_m.new_empty(work.ids_mK.shape)
        made = Statistics(logprobs_m, entropy_m, topk_mK, ctx.all_mV)
        if not work.measured:
            for part in _blocks(logits_mV, work.block):
                _measure(logits_mV, work, part, made)
            work.measured = True
        stand_in = None if ctx.all_mV is None else logprobs_m.new_empty_strided((m, vocab), (0, 0))
        return (*made[:3], stand_in)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if all(gradient is None for gradient in gradients):
            return None, None
        values_mV = ctx.saved_tensors[0] if ctx.all_mV is None else ctx.all_mV
        overwrite = ctx.fresh and ctx.all_mV is None
        into_mV = values_mV.detach() if overwrite else torch.empty_like(values_mV, dtype=ctx.dtype)
        if ctx.all_mV is not None and gradients[1] is gradients[2] is None and _has_kernels(values_mV):
            _fused_gradient_of_all(values_mV, ctx.work, gradients[0], gradients[3], into_mV)
            return into_mV, None
        for part in _blocks(values_mV, ctx.work.block):
            _gradient(values_mV, ctx.work, part, gradients, into_mV[part])
        return into_mV, None


class _Joined(torch.autograd.Function):
    """Log-probs of the whole vocabulary in place of each chunk's stand-in."""

    @staticmethod
    def forward(ctx: Any, everything: _Everything, *stand_ins: Tensor) -> Tensor:
        all_MV, everything.MV = everything.MV, None
        assert all_MV is not None
        ctx.sizes = [len(x) for x in stand_ins]
        ctx.save_for_backward(all_MV)  # so that overwriting it before the backward pass is an error
        return all_MV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MV: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, *torch.split(gradient_MV, ctx.sizes)


# --- a block ----------------------------------------------------------------------------------------------------------


def _blocks(logits_mV: Tensor, block: int) -> list[slice]:
    """The rows of each block."""
    m, vocab = logits_mV.shape
    if logits_mV.device.type == "cpu":
        block *= torch.get_num_threads()
    size = max(1, block // vocab)
    return [slice(start, start + size) for start in range(0, m, size)]


def _tempered(logits_nV: Tensor, asked: Asked) -> Tensor:
    """The logits that are sampled from; the given ones where nothing changes them."""
    if asked.temperature != 1:
        logits_nV = logits_nV.float() / asked.temperature
    if asked.banned is not None and len(asked.banned):
        logits_nV = logits_nV.float().index_fill(-1, asked.banned, BANNED)
    return logits_nV


def _measure(logits_mV: Tensor, work: _Work, part: slice, made: Statistics) -> None:
    """Write the statistics of a block's rows."""
    full_nV = None if made.full_logprobs_MV is None else made.full_logprobs_MV[part]
    all_nV = torch.log_softmax(_tempered(logits_mV[part], work.asked), -1, dtype=torch.float32, out=full_nV)
    torch.gather(all_nV, -1, work.target_m[part, None], out=made.logprobs_M[part, None])
    if made.topk_logprobs_MK is not None:
        assert work.ids_mK is not None
        made.topk_logprobs_MK[part] = all_nV.gather(-1, work.ids_mK[part])
    if made.entropy_M is not None:
        made.entropy_M[part] = -all_nV.exp().mul_(all_nV).sum(-1)


def _gradient(values_mV: Tensor, work: _Work, part: slice, gradients: Sequence[Tensor | None], into_nV: Tensor) -> None:
    """Write the gradient of a block's logits. ``values_mV``: the chunk's logits, or log-probs where all were asked for.

    With probabilities p, entropy S, the gradient g of the log-prob of token t and s of the entropy, that of logit j is
    (g ([j = t] - p_j) - s p_j (log p_j + S)) / temperature. Every other log-prob adds to it as that of t does.
    """
    asked, heat = work.asked, work.asked.temperature
    g_n, s_n, g_nK, g_nV = (None if x is None else x[part] if heat == 1 else x[part] / heat for x in gradients)
    values_nV, target_n1 = values_mV[part], work.target_m[part, None]
    if work.everything is None and s_n is None and g_nK is None:
        assert g_n is not None
        made_nV = _tempered(values_nV, asked).softmax(-1, dtype=torch.float32)
        made_nV.scatter_add_(-1, target_n1, made_nV.new_full((1, 1), -1).expand_as(target_n1))
        _without_banned(made_nV, asked)
        torch.mul(made_nV, -g_n[:, None], out=into_nV)  # one pass less over memory than in place and copied
        return
    all_nV = values_nV if work.everything else _tempered(values_nV, asked).log_softmax(-1, dtype=torch.float32)
    made_nV = all_nV.exp()
    pull_n1 = made_nV.new_zeros(len(made_nV), 1)
    for g in (g_n, g_nK, g_nV):
        pull_n1 = pull_n1 if g is None else pull_n1 + g.reshape(len(g), -1).sum(-1, keepdim=True)
    if s_n is not None:
        entropy_n1 = -(made_nV * all_nV).sum(-1, keepdim=True)
        pull_n1 = torch.addcmul(pull_n1 + s_n[:, None] * entropy_n1, all_nV, s_n[:, None])
    made_nV.mul_(pull_n1.neg_())
    if g_n is not None:
        made_nV.scatter_add_(-1, target_n1, g_n[:, None])
    if g_nK is not None:
        assert work.ids_mK is not None
        made_nV.scatter_add_(-1, work.ids_mK[part], g_nK)
    if g_nV is not None:
        made_nV.add_(g_nV)
    into_nV.copy_(_without_banned(made_nV, asked))


def _without_banned(gradient_nV: Tensor, asked: Asked) -> Tensor:
    """With 0 for the logits that were replaced."""
    if asked.banned is not None and len(asked.banned):
        gradient_nV.index_fill_(-1, asked.banned, 0)
    return gradient_nV
