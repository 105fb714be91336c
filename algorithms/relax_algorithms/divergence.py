"""How far a student's next-token distribution is from its teacher's: pure functions on log-probs.

Legend: N tokens, n of a block, V the whole vocabulary, K candidates of a token, ... any leading dimensions. Every
distribution is given by log-probs along the last dimension, which it fills: exp of them sums to 1. A divergence is in
nats, 0 where both agree, and has the gradient of the written formula at the student's log-probs; the teacher gets none.

Vocabularies are wide, so tokens are taken in blocks: besides the two distributions and the student's gradient nothing
of their size is made. Of few numbers autograd makes the gradient alone: that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Kind = Literal["reverse", "forward", "jsd"]

FLOOR = -1e4
"""Log-probs are raised to it. Its exp is 0, as is that of a banned token (-1e30 or -inf), but 0 x a finite difference
is 0 and not NaN; and a token that only the teacher excludes costs a finite number of nats."""
REST = 1e-6
"""The least mass of a rest bucket: sums of float32 probabilities are not more exact, and below it a rest has no
gradient."""

_BLOCK = {"cpu": 1 << 16}
_GPU_BLOCK = 1 << 24
"""Elements (n, V) that are looked at at once; on a CPU for each of its threads, to stay in their caches."""
_PLAIN = 1 << 16
"""Elements (N, V) up to which autograd does it alone."""


def divergence(kind: Kind, student: Tensor, teacher: Tensor, beta: float = 0.5, mask: Tensor | None = None) -> Tensor:
    """Of the distributions (..., V) (...,): ``reverse``, ``forward``, or ``jsd`` with ``beta``.

    ``mask`` (...,), bool: the tokens that count. The others may hold anything, NaN too: their divergence is 0, and so
    is their gradient.
    """
    return with_reverse(kind, student, teacher, beta, mask)[0]


def with_reverse(
    kind: Kind, student: Tensor, teacher: Tensor, beta: float = 0.5, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The divergence, and the reverse one without gradient, by which runs with different ones can be compared."""
    if student.numel() > _PLAIN:
        made: tuple[Tensor, Tensor] = _Blockwise.apply(kind, student, teacher, beta, mask)  # type: ignore[no-untyped-call]
        return made
    if mask is None:
        found, against = _distances(kind, student, teacher.detach(), beta)
        return found, against.detach()
    found, against = with_reverse(kind, student[mask], teacher[mask], beta)
    nothing = found.new_zeros(mask.shape)
    return nothing.masked_scatter(mask, found), nothing.masked_scatter(mask, against)


def reverse(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) (...,): the sum of p_S (log p_S - log p_T); MiniLLM (arXiv:2306.08543).

    It makes the student avoid what the teacher would not say, and lets it keep to some of what the teacher would.
    """
    return divergence("reverse", student, teacher)


def forward(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) (...,): the sum of p_T (log p_T - log p_S). It makes the student cover all of p_T."""
    return divergence("forward", student, teacher)


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence (...,) of GKD (arXiv:2306.13649), with 0 < ``beta`` < 1.

    beta KL(teacher || M) + (1 - beta) KL(student || M), where M = beta teacher + (1 - beta) student. Divided by beta it
    becomes ``forward`` as beta goes to 0; divided by 1 - beta, ``reverse`` as beta goes to 1. 0.5: the symmetric one.
    """
    return divergence("jsd", student, teacher, beta)


class _Blockwise(torch.autograd.Function):
    """The gradient, too: it is made in the backward pass, of the same two distributions."""

    @staticmethod
    def forward(
        ctx: Any, kind: Kind, student: Tensor, teacher: Tensor, beta: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(student, teacher)
        ctx.kind, ctx.beta, ctx.mask = kind, beta, mask
        if _has_kernels(student, teacher):
            from relax_algorithms import divergence_kernels

            mask_N = None if mask is None else mask.flatten()
            made = divergence_kernels.distances(kind, _flat(student), _flat(teacher), beta, mask_N, FLOOR)
            found, against = (values_N.view(student.shape[:-1]) for values_N in made)
            ctx.mark_non_differentiable(against)
            return found, against
        ctx.blocks = _blocks(student, mask)
        student_NV, teacher_NV = _flat(student), _flat(teacher)
        dtype = torch.promote_types(student.dtype, teacher.dtype)
        found, against = (torch.zeros(student.shape[:-1], dtype=dtype, device=student.device) for _ in range(2))
        for block in ctx.blocks:
            made = _distances(kind, student_NV[block], teacher_NV[block], beta)
            found.view(-1)[block], against.view(-1)[block] = made
        ctx.mark_non_differentiable(against)
        return found, against

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        student, teacher = ctx.saved_tensors
        if _has_kernels(student, teacher):
            from relax_algorithms import divergence_kernels

            mask_N, gradient_N = None if ctx.mask is None else ctx.mask.flatten(), gradient.flatten().contiguous()
            of = (ctx.kind, _flat(student), _flat(teacher), ctx.beta, mask_N, FLOOR, gradient_N)
            return None, divergence_kernels.slope(*of).view(student.shape), None, None, None
        student_NV, teacher_NV, gradient_N1 = _flat(student), _flat(teacher), gradient.reshape(-1, 1)
        every = isinstance(ctx.blocks[0], slice)
        made_NV = torch.empty_like(student_NV) if every else torch.zeros_like(student_NV)
        for block in ctx.blocks:
            slope_nV = _slope(ctx.kind, student_NV[block], teacher_NV[block], ctx.beta)
            made_NV[block] = slope_nV.mul_(gradient_N1[block])
        return None, made_NV.view(student.shape), None, None, None


def _has_kernels(student: Tensor, teacher: Tensor) -> bool:
    lies_flat = student.is_contiguous() and teacher.is_contiguous()
    return student.is_cuda and lies_flat and find_spec("triton") is not None


def _flat(logprobs: Tensor) -> Tensor:
    """(..., V) as (N, V)."""
    return logprobs.reshape(-1, logprobs.shape[-1])


def _blocks(logprobs: Tensor, mask: Tensor | None) -> Sequence[slice | Tensor]:
    """Which tokens are taken at once: the next ones of all, or of those that count where some do not."""
    device, tokens = logprobs.device.type, logprobs.shape[:-1].numel()
    elements = _BLOCK.get(device, _GPU_BLOCK) * (torch.get_num_threads() if device == "cpu" else 1)
    size = max(1, elements // logprobs.shape[-1])
    if mask is None or mask.all():
        return [slice(start, start + size) for start in range(0, tokens, size)]
    return torch.split(mask.flatten().nonzero()[:, 0], size)


def _distances(kind: Kind, student_nV: Tensor, teacher_nV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of each token (n,), and the reverse one (n,)."""
    s_nV, t_nV = student_nV.clamp(min=FLOOR), teacher_nV.clamp(min=FLOOR)
    p_nV = s_nV.exp()
    reverse_n = (p_nV * (s_nV - t_nV)).sum(-1)
    match kind:
        case "reverse":
            return reverse_n, reverse_n
        case "forward":
            return (t_nV.exp() * (t_nV - s_nV)).sum(-1), reverse_n
        case "jsd":
            m_nV = _mixture(s_nV, t_nV, beta)
            from_teacher_n = (t_nV.exp() * (t_nV - m_nV)).sum(-1)
            return beta * from_teacher_n + (1 - beta) * (p_nV * (s_nV - m_nV)).sum(-1), reverse_n


def _slope(kind: Kind, student_nV: Tensor, teacher_nV: Tensor, beta: float) -> Tensor:
    """The derivative of each token's divergence by the student's log-probs (n, V).

    That of ``jsd`` is as short because what comes by way of the mixture cancels: m dlog m = (1 - beta) p_S dlog p_S.
    """
    t_nV = teacher_nV.clamp(min=FLOOR)
    if kind == "forward":
        made_nV = t_nV.exp_().neg_()
        return made_nV.masked_fill_(student_nV < FLOOR, 0)  # the floor has no slope
    s_nV = student_nV.clamp(min=FLOOR)
    if kind == "reverse":
        return (s_nV - t_nV).add_(1).mul_(s_nV.exp_())
    return (s_nV - _mixture(s_nV, t_nV, beta)).mul_(s_nV.exp_()).mul_(1 - beta)


def _mixture(s_nV: Tensor, t_nV: Tensor, beta: float) -> Tensor:
    """log (beta p_T + (1 - beta) p_S) (n, V)."""
    return torch.logaddexp(t_nV + math.log(beta), s_nV + math.log1p(-beta)).clamp(min=FLOOR)


def with_rest(logprobs: Tensor) -> Tensor:
    """Log-probs of K candidates (..., K) and of all other tokens together (..., K + 1): a full distribution.

    Merging tokens never raises a divergence: of such distributions it is a lower bound of that over the vocabulary,
    and the same where the candidates are all of it.
    """
    covered = logprobs.clamp(min=FLOOR).logsumexp(-1, keepdim=True).clamp(max=math.log1p(-REST))
    return torch.cat([logprobs, log1mexp(covered)], -1)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact near 0 and far from it; with gradient."""
    far = x.clamp(max=-math.log(2))  # where log1p is not taken it must be finite, too: 0 x inf in a gradient is NaN
    return torch.where(x > -math.log(2), (-torch.expm1(x)).log(), torch.log1p(-far.exp()))
