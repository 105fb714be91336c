"""How far a student's next-token distribution is from its teacher's: pure functions on log-probs.

Legend: N tokens, V the whole vocabulary, K candidates of a token, ... any leading dimensions. Every distribution is
given by log-probs along the last dimension, which it fills: exp of them sums to 1. A divergence is in nats, 0 where
both agree, and has the gradient of the written formula.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["reverse", "forward", "jsd"]

FLOOR = -1e4
"""Log-probs are raised to it. Its exp is 0, as is that of a banned token (-1e30 or -inf), but 0 x a finite difference
is 0 and not NaN; and a token that only the teacher excludes costs a finite number of nats."""
REST = 1e-6
"""The least mass of a rest bucket: sums of float32 probabilities are not more exact, and below it a rest has no
gradient."""


def divergence(kind: Kind, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Of the distributions (..., V) (...,): ``reverse``, ``forward``, or ``jsd`` with ``beta``."""
    match kind:
        case "reverse":
            return reverse(student, teacher)
        case "forward":
            return forward(student, teacher)
        case "jsd":
            return jsd(student, teacher, beta)


def reverse(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) (...,): the sum of p_S (log p_S - log p_T); MiniLLM (arXiv:2306.08543).

    It makes the student avoid what the teacher would not say, and lets it keep to some of what the teacher would.
    """
    student, teacher = student.clamp(min=FLOOR), teacher.clamp(min=FLOOR)
    return (student.exp() * (student - teacher)).sum(-1)


def forward(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) (...,): the sum of p_T (log p_T - log p_S). It makes the student cover all of p_T."""
    return reverse(teacher, student)


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence (...,) of GKD (arXiv:2306.13649), with 0 < ``beta`` < 1.

    beta KL(teacher || M) + (1 - beta) KL(student || M), where M = beta teacher + (1 - beta) student. Divided by beta it
    becomes ``forward`` as beta goes to 0; divided by 1 - beta, ``reverse`` as beta goes to 1. 0.5: the symmetric one.
    """
    student, teacher = student.clamp(min=FLOOR), teacher.clamp(min=FLOOR)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * reverse(teacher, mixture) + (1 - beta) * reverse(student, mixture)


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
