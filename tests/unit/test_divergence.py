"""Divergences by hand, against autograd of the plainly written formulas, at their limits, and with banned tokens.

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relax_algorithms import divergence as distances
from relax_algorithms.divergence import Kind

LN = math.log
KINDS: tuple[Kind, ...] = ("reverse", "forward", "jsd")


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def logits(seed: int, n: int = 16, v: int = 7) -> Tensor:
    return 2 * torch.randn(n, v, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(kind: Kind, student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The formulas as the papers write them, on probabilities (N, V)."""
    p, q = student, teacher
    m = beta * q + (1 - beta) * p
    match kind:
        case "reverse":
            return (p * (p / q).log()).sum(-1)
        case "forward":
            return (q * (q / p).log()).sum(-1)
        case "jsd":
            return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Student (1/2, 1/2), teacher (1/4, 3/4).

    Mixtures: beta 1/2 gives (3/8, 5/8), beta 1/4, a quarter of the teacher, (7/16, 9/16).
    """
    student, teacher = log(1 / 2, 1 / 2), log(1 / 4, 3 / 4)
    reverse = LN(2) / 2 + LN(2 / 3) / 2
    forward = LN(1 / 2) / 4 + 3 * LN(3 / 2) / 4
    assert distances.reverse(student, teacher).item() == pytest.approx(reverse, abs=1e-12)
    assert distances.forward(student, teacher).item() == pytest.approx(forward, abs=1e-12)
    half = (LN(2 / 3) / 4 + 3 * LN(6 / 5) / 4) / 2 + (LN(4 / 3) / 2 + LN(4 / 5) / 2) / 2
    assert distances.jsd(student, teacher, 0.5).item() == pytest.approx(half, abs=1e-12)
    quarter = (LN(4 / 7) / 4 + 3 * LN(4 / 3) / 4) / 4 + 3 * (LN(8 / 7) / 2 + LN(8 / 9) / 2) / 4
    assert distances.jsd(student, teacher, 0.25).item() == pytest.approx(quarter, abs=1e-12)
    assert distances.jsd(teacher, student, 0.75).item() == pytest.approx(quarter, abs=1e-12)
    assert len({round(x, 6) for x in (reverse, forward, half, quarter)}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions(kind: Kind) -> None:
    """Exactly 0, with a gradient of exactly 0 where it matters: at the logits."""
    student = logits(0).requires_grad_()
    found = distances.divergence(kind, student.log_softmax(-1), student.detach().log_softmax(-1), 0.3)
    assert found.abs().max().item() < 1e-15
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.abs().max().item() < 1e-15


def test_gradients_by_hand() -> None:
    """At the logits: forward p_S - p_T; reverse p_S (log p_S / p_T - KL)."""
    student, teacher = logits(1).requires_grad_(), logits(2).log_softmax(-1)
    p, q = student.detach().softmax(-1), teacher.exp()
    (gradient,) = torch.autograd.grad(distances.forward(student.log_softmax(-1), teacher).sum(), student)
    assert (gradient - (p - q)).abs().max().item() < 1e-12
    found = distances.reverse(student.log_softmax(-1), teacher)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert (gradient - p * ((p / q).log() - found.detach()[:, None])).abs().max().item() < 1e-12


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_written_formula(kind: Kind, beta: float) -> None:
    """Value, and gradient at the student's logits; float64."""
    student, teacher = logits(3), logits(4)
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    found = distances.divergence(kind, ours.log_softmax(-1), teacher.log_softmax(-1), beta)
    expected = plain(kind, theirs.softmax(-1), teacher.softmax(-1), beta)
    assert (found - expected).abs().max().item() < 1e-12
    (gradient,), (wanted,) = torch.autograd.grad(found.sum(), ours), torch.autograd.grad(expected.sum(), theirs)
    assert wanted.abs().max().item() > 0.01
    assert (gradient - wanted).abs().max().item() < 1e-12


@pytest.mark.parametrize(("beta", "scale", "kind"), [(1e-5, 1e-5, "forward"), (1 - 1e-5, 1e-5, "reverse")])
def test_limits_of_jsd(beta: float, scale: float, kind: Kind) -> None:
    """Over beta it is the forward divergence as beta goes to 0, over 1 - beta the reverse one as it goes to 1."""
    student, teacher = logits(5).log_softmax(-1), logits(6).log_softmax(-1)
    limit = distances.divergence(kind, student, teacher)
    found = distances.jsd(student, teacher, beta) / scale
    assert torch.allclose(found, limit, rtol=2e-2)
    nearer = distances.jsd(student, teacher, beta + 0.9 * scale * (1 if beta > 0.5 else -1)) / (0.1 * scale)
    assert (nearer - limit).abs().sum() < (found - limit).abs().sum()


# --- block by block ---------------------------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens of seven in a block, however few there are."""
    monkeypatch.setattr(distances, "_PLAIN", 0)
    monkeypatch.setattr(distances, "_BLOCK", {"cpu": 22 // torch.get_num_threads()})


MASKS = {
    "all": None,
    "every": torch.ones(2, 8, dtype=torch.bool),
    "some": torch.arange(16).view(2, 8) % 3 != 1,
    "none": torch.zeros(2, 8, dtype=torch.bool),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("blocks")
def test_blocks_are_autograd_of_the_written_formula(kind: Kind, mask: Tensor | None, dtype: torch.dtype) -> None:
    """What does not count is NaN, changes nothing and gets a gradient of exactly 0, with another weight each."""
    student, teacher = (x.to(dtype).view(2, 8, 7) for x in (logits(3), logits(4).log_softmax(-1)))
    counts = torch.ones(2, 8, dtype=torch.bool) if mask is None else mask
    weights = torch.linspace(-1, 2, 16, dtype=dtype).view(2, 8)
    ours = torch.where(counts[..., None], student.log_softmax(-1), math.nan).requires_grad_()
    unsaid = torch.where(counts[..., None], teacher, math.nan)
    found, against = distances.with_reverse(kind, ours, unsaid, 0.3, mask)
    theirs = student.log_softmax(-1).requires_grad_()
    expected = torch.where(counts, plain(kind, theirs.exp(), teacher.exp(), 0.3), 0)
    reverse = torch.where(counts, plain("reverse", theirs.detach().exp(), teacher.exp(), 0.3), 0)
    assert not against.requires_grad and (against - reverse).abs().max().item() < 1e-6
    assert (found - expected).abs().max().item() < 1e-6
    (gradient,) = torch.autograd.grad((weights * found).sum(), ours)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), theirs)
    assert gradient.dtype == dtype and (gradient - wanted).abs().max().item() < 1e-6
    assert not gradient[~counts].any()
    assert not counts.any() or wanted.abs().max().item() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_autograd_agree_where_log_probs_are_floored(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that both exclude, one that the student excludes, and one that the teacher does."""
    student, teacher = logits(7).log_softmax(-1), logits(8).log_softmax(-1)
    student[:, 0] = teacher[:, 0] = -1e9
    student[:, 1] = teacher[:, 2] = -1e9
    ends = []
    for limit in (0, 1 << 16):
        monkeypatch.setattr(distances, "_PLAIN", limit)
        leaf = student.clone().requires_grad_()
        found = distances.divergence(kind, leaf, teacher, 0.3)
        ends.append((found.detach(), *torch.autograd.grad(found.sum(), leaf)))
    for ours, theirs in zip(*ends, strict=True):
        assert ours.isfinite().all() and torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not ends[0][1][:, :2].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("blocks")
def test_only_the_gradient_is_as_big_as_the_distributions(kind: Kind, masked: bool) -> None:
    student, teacher = logits(3, 64).log_softmax(-1).requires_grad_(), logits(4, 64).log_softmax(-1)
    mask = torch.arange(64) % 2 == 0 if masked else None
    watch = Watch(student.numel() // 4)
    with watch:
        found = distances.divergence(kind, student, teacher, 0.3, mask)
        assert watch.made == 0
        found.sum().backward()  # type: ignore[no-untyped-call]
    assert watch.made == 1


class Watch(TorchDispatchMode):
    """How many tensors of at least so many elements were made."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least, self.made = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.made += x.untyped_storage().nbytes() >= self.least * x.element_size()
        return result


# --- tokens that cannot be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("banned", [-1e30, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_banned_tokens_change_nothing(kind: Kind, dtype: torch.dtype, banned: float) -> None:
    student, teacher = logits(7).to(dtype), logits(8).to(dtype).log_softmax(-1)
    wide = torch.cat([student, torch.full((len(student), 2), banned, dtype=dtype)], -1).requires_grad_()
    wide_teacher = torch.cat([teacher, torch.full((len(student), 2), 2 * banned, dtype=dtype)], -1)
    narrow = student.requires_grad_()
    found = distances.divergence(kind, wide.log_softmax(-1), wide_teacher, 0.3)
    expected = distances.divergence(kind, narrow.log_softmax(-1), teacher, 0.3)
    assert torch.allclose(found, expected, rtol=1e-6)
    (gradient,), (wanted,) = torch.autograd.grad(found.sum(), wide), torch.autograd.grad(expected.sum(), narrow)
    assert torch.allclose(gradient[:, :-2], wanted, atol=1e-6)
    assert not gradient[:, -2:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_side_excludes_is_finite(kind: Kind) -> None:
    leaf = torch.tensor([0.0, 0.0, 0.0]).requires_grad_()
    excluded = torch.tensor([math.log(0.5), math.log(0.5), -1e30])
    for student, teacher in ((leaf.log_softmax(-1), excluded), (excluded + 0 * leaf, leaf.detach().log_softmax(-1))):
        found = distances.divergence(kind, student, teacher, 0.5)
        (gradient,) = torch.autograd.grad(found, leaf)
        assert 0 < found.item() < 1e4 and gradient.isfinite().all()


# --- candidates and the rest ------------------------------------------------------------------------------------------


def candidates(kind: Kind, student: Tensor, teacher: Tensor) -> Tensor:
    """With beta 0.3, of log-probs (N, K) of the same K tokens."""
    return distances.divergence(kind, distances.with_rest(student), distances.with_rest(teacher), 0.3)


def test_with_rest_by_hand() -> None:
    """Of (1/2, 1/4, 1/8, 1/8) the first two leave 1/4; of (1/8, 1/8, 1/2, 1/4) they leave 3/4."""
    student = distances.with_rest(log(1 / 2, 1 / 4))
    teacher = distances.with_rest(log(1 / 8, 1 / 8))
    assert student.exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 4])
    assert teacher.exp().tolist() == pytest.approx([1 / 8, 1 / 8, 3 / 4])
    found = distances.reverse(student, teacher).item()
    assert found == pytest.approx(LN(4) / 2 + LN(2) / 4 + LN(1 / 3) / 4)
    full = distances.reverse(log(1 / 2, 1 / 4, 1 / 8, 1 / 8), log(1 / 8, 1 / 8, 1 / 2, 1 / 4)).item()
    assert full == pytest.approx(LN(4) / 2 + LN(2) / 4 + LN(1 / 4) / 8 + LN(1 / 2) / 8)
    assert found < full


@pytest.mark.parametrize("kind", KINDS)
def test_with_rest_is_a_lower_bound(kind: Kind) -> None:
    """It grows with the candidates, and with all but one of them is the divergence itself: the rest is that one."""
    student, teacher = logits(9).log_softmax(-1), logits(10).log_softmax(-1)
    full = distances.divergence(kind, student, teacher, 0.3)
    order = teacher.argsort(-1, descending=True)
    before = torch.zeros_like(full)
    for k in range(1, 7):
        ids = order[:, :k]
        found = candidates(kind, student.gather(-1, ids), teacher.gather(-1, ids))
        assert (found <= full + 1e-12).all() and (found >= before - 1e-12).all()
        before = found
        if k < 4:
            assert (full - found).max() > 0.01
    assert (before - full).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_all_candidates_are_exact(kind: Kind, dtype: torch.dtype) -> None:
    """K = V: covered mass is 1 but for rounding, and the rest adds nothing to value or gradient."""
    student, teacher = logits(11, 64, 50).to(dtype), logits(12, 64, 50).to(dtype).log_softmax(-1)
    one, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    topk = candidates(kind, one.log_softmax(-1), teacher)
    full = distances.divergence(kind, other.log_softmax(-1), teacher, 0.3)
    assert torch.allclose(topk, full, atol=1e-5)
    (found,), (wanted,) = torch.autograd.grad(topk.sum(), one), torch.autograd.grad(full.sum(), other)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_candidates(kind: Kind) -> None:
    """Against the plain formula on probabilities whose last is one minus the others."""
    student, teacher = logits(13), logits(14).softmax(-1)
    one, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    found = candidates(kind, one.log_softmax(-1)[:, :3], teacher.log()[:, :3])
    p, q = (torch.cat([x[:, :3], 1 - x[:, :3].sum(-1, keepdim=True)], -1) for x in (other.softmax(-1), teacher))
    expected = plain(kind, p, q, 0.3)
    assert (found - expected).abs().max().item() < 1e-12
    (gradient,), (wanted,) = torch.autograd.grad(found.sum(), one), torch.autograd.grad(expected.sum(), other)
    assert (gradient - wanted).abs().max().item() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_that_cover_nothing_or_too_much(kind: Kind) -> None:
    """A banned candidate, and rounding that makes the covered mass exceed 1: all finite, gradient too."""
    none = [-math.inf] * 3
    student = torch.tensor([[0.0, -30.0, -1e30], [-40.0, -50.0, -1e30], [2e-7, -17.0, -math.inf], none])
    teacher = torch.tensor([[-1.0, -1.0, -1e30], [-1e-9, -21.0, -1e30], [1e-7, -16.0, -math.inf], none])
    student.requires_grad_()
    found = candidates(kind, student, teacher)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert found.isfinite().all() and gradient.isfinite().all()
    assert found[2:].tolist() == pytest.approx([0, 0], abs=1e-5)


def test_log1mexp() -> None:
    x = torch.tensor([-1e-9, -1e-3, -0.693, -0.6932, -2.0, -40.0, -1e4], dtype=torch.float64, requires_grad=True)
    found = distances.log1mexp(x)
    expected = [
        LN(-math.expm1(-1e-9)),
        *(LN(-math.expm1(y)) for y in (-1e-3, -0.693, -0.6932, -2.0)),
        -math.exp(-40),
        0,
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    slopes = [-math.exp(y) / -math.expm1(y) for y in x.tolist()]
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12)
    single = torch.tensor([-1e-9], requires_grad=True)  # exp of it is 1 in float32
    (gradient,) = torch.autograd.grad(distances.log1mexp(single), single)
    assert gradient.item() == pytest.approx(-1e9, rel=1e-6)
