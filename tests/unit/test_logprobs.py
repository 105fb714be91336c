"""Chunked log-probs against one log-softmax over all logits: values, gradients, and what is held meanwhile.

Legend: M tokens, H hidden size, K given ids of a token, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relax_core.torch.forward import States
from relax_core.torch.logprobs import Asked, Limits, Statistics, limits_of, statistics

M, H, K, V = 23, 8, 3, 41
PLAIN = Limits(chunk=1 << 20, block=1 << 20, kept=1 << 20, plain=1 << 20)
KEPT = Limits(chunk=5 * V, block=2 * V, kept=1 << 20)
"""Four chunks of five tokens and one of three; blocks of two tokens."""
AGAIN = replace(KEPT, kept=0)
SOME = replace(KEPT, kept=(3 + 5 + 5) * V * 4)
"""The last three chunks are kept."""
WIDE = replace(KEPT, chunk=1 << 20)
"""One chunk of many blocks."""
MANY = {"kept": KEPT, "again": AGAIN, "some": SOME, "wide": WIDE}
ALL = {"plain": PLAIN, **MANY}
BANNED = torch.tensor([0, 7])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Blocks are as big as said here, and nothing depends on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Biased(nn.Module):
    """A head with bias; subclasses bend its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, V)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.bent(self.linear(hidden), hidden)

    def bent(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return logits


class Capped(Biased):
    def bent(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(logits / 2) * 2


class Squashed(Biased):
    """Its last operation needs its own result for its gradient: overwriting that would spoil it."""

    def bent(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(logits)


class Adapted(Biased):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(H, 2, bias=False), nn.Linear(2, V, bias=False)

    def bent(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return logits.add(self.up(self.down(hidden)), alpha=0.5)


class Tied(Biased):
    """The hidden states were made by the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, V, bias=False)


HEADS = [Biased, Capped, Squashed, Adapted, Tied]


def made(head: type[Biased] = Biased, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A head and hidden states (M, H), targets (M,) and ids (M, K); the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = head().to(dtype)
        hidden_MH = (2 * torch.randn(M, H)).to(dtype)
        target_M, ids_MK = torch.randint(8, V, (M,)), torch.rand(M, V).topk(K).indices
        if head is Tied:
            hidden_MH = module.linear.weight[target_M] * 3
        else:
            hidden_MH.requires_grad_()
        return module, hidden_MH, target_M, ids_MK


def naive(
    head: Callable[[Tensor], Tensor], hidden_MH: Tensor, target_M: Tensor, asked: Asked, ids_MK: Tensor | None
) -> Statistics:
    logits_MV = head(hidden_MH).float() / asked.temperature
    if asked.banned is not None:
        logits_MV = logits_MV.index_fill(-1, asked.banned, -1e9)
    all_MV = logits_MV.log_softmax(-1)
    return Statistics(
        all_MV.gather(-1, target_M[:, None])[:, 0],
        -(all_MV.exp() * all_MV).sum(-1),
        None if ids_MK is None else all_MV.gather(-1, ids_MK),
        all_MV,
    )


def loss(found: Statistics, asked: Asked, only: str | None = None) -> Tensor:
    """A random linear function of what was asked for, and so a different gradient for each number."""
    parts = [("logprobs", found.logprobs_M), ("topk", found.topk_logprobs_MK)]
    parts += [("entropy", found.entropy_M if asked.entropy else None)]
    parts += [("full", found.full_logprobs_MV if asked.full else None)]
    total = torch.zeros(())
    for i, (name, values) in enumerate(parts):
        if values is not None and only in (None, name):
            if name == "full" and asked.banned is not None:  # a banned one is -1e9: nothing else would be seen
                values = values.index_fill(-1, asked.banned, 0)
            weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(i))
            total = total + (weights * values).sum()
    return total


def gradients(total: Tensor, head: nn.Module, hidden: Tensor) -> list[Tensor]:
    total.backward()  # type: ignore[no-untyped-call]
    found = [*(p.grad for p in head.parameters()), hidden.grad if hidden.is_leaf else None]
    return [g.clone() for g in found if g is not None]


def both(
    limits: Limits, asked: Asked, head: type[Biased] = Biased, topk: bool = False, only: str | None = None
) -> None:
    """Assert that values and gradients are those of the naive computation."""
    ends = []
    for ours in (True, False):
        module, hidden, target, ids = made(head)
        ids = ids if topk else None
        found = statistics(module, hidden, target, V, asked, ids, limits) if ours else None
        found = found or naive(module, hidden, target, asked, ids)
        ends.append((found, gradients(loss(found, asked, only), module, hidden)))
    (found, ours_), (expected, theirs) = ends
    wanted = (True, asked.entropy, topk, asked.full)
    for value, reference, there in zip(found, expected, wanted, strict=True):
        assert (value is not None) == there
        if value is not None and reference is not None:
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)
    assert len(ours_) == len(theirs) > 0
    for gradient, reference in zip(ours_, theirs, strict=True):
        assert float(reference.abs().max()) > 0.01
        assert float((gradient - reference).abs().max()) <= 1e-6 * max(1.0, float(reference.abs().max()))


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("banned", [None, BANNED], ids=["all", "banned"])
def test_logprobs(limits: Limits, temperature: float, banned: Tensor | None) -> None:
    both(limits, Asked(temperature, banned))


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
@pytest.mark.parametrize("head", HEADS)
def test_any_head(limits: Limits, head: type[Biased]) -> None:
    both(limits, Asked(0.6, BANNED, entropy=True), head, topk=True)


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
@pytest.mark.parametrize("only", [None, "logprobs", "entropy", "topk", "full"])
def test_each_output_alone_and_all_together(limits: Limits, only: str | None) -> None:
    both(limits, Asked(0.6, BANNED, entropy=True, full=True), topk=True, only=only)
    if only != "full":
        both(limits, Asked(entropy=True), topk=True, only=only)


def test_by_hand() -> None:
    """Logits 0 and log 3: p is 1/4 and 3/4, the entropy log 4 - 3/4 log 3; d log p_1 = (-1/4, 1/4),
    dS_j = -p_j (log p_j + S), which is (3/16) log 3 for the first logit and its opposite for the other."""
    logits = torch.tensor([[0.0, 3.0]]).log1p().clamp(min=0)  # log 1, log 4
    logits[0, 1] = torch.tensor(3.0).log()
    weight = logits.clone().repeat(4, 1).requires_grad_()
    limits = Limits(chunk=4, block=2, kept=0)
    found = statistics(lambda h: 1.0 * h, weight, torch.ones(4, dtype=torch.long), 2, Asked(entropy=True), None, limits)
    log3, log4 = float(torch.tensor(3.0).log()), float(torch.tensor(4.0).log())
    assert found.entropy_M is not None
    assert found.logprobs_M.tolist() == pytest.approx([log3 - log4] * 4, abs=1e-6)
    assert found.entropy_M.tolist() == pytest.approx([log4 - 0.75 * log3] * 4, abs=1e-6)
    (found.logprobs_M.sum() + 2 * found.entropy_M.sum()).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    rise = -0.25 + 2 * 3 / 16 * log3
    assert weight.grad.flatten().tolist() == pytest.approx([rise, -rise] * 4, abs=1e-6)
    assert torch.equal(weight.detach(), logits.repeat(4, 1))  # the head's input is never overwritten


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_a_head_that_gives_back_its_input_keeps_it(limits: Limits) -> None:
    hidden = torch.randn(M, V, generator=torch.Generator().manual_seed(1))
    leaf, target = hidden.clone().requires_grad_(), torch.arange(M)
    statistics(lambda h: h, leaf, target, V, Asked(), None, limits).logprobs_M.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.detach(), hidden)
    assert leaf.grad is not None
    one_hot = nn.functional.one_hot(target, V)
    torch.testing.assert_close(leaf.grad, one_hot - hidden.softmax(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_a_bfloat16_head_has_float32_statistics(limits: Limits) -> None:
    """The same logits, made in the same chunks, since a bfloat16 product depends on its shape."""
    asked = Asked(0.6, BANNED, entropy=True)
    size = limits.chunk // V
    module, hidden, target, ids = made(dtype=torch.bfloat16)
    found = statistics(module, hidden, target, V, asked, ids, limits)
    ours = gradients(loss(found, asked), module, hidden)
    module, hidden, _, _ = made(dtype=torch.bfloat16)
    expected = naive(lambda h: torch.cat([module(part) for part in torch.split(h, size)]), hidden, target, asked, ids)
    theirs = gradients(loss(expected, asked), module, hidden)
    assert found.logprobs_M.dtype == torch.float32
    torch.testing.assert_close(found.logprobs_M, expected.logprobs_M, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy_M, expected.entropy_M, rtol=1e-6, atol=1e-6)
    for gradient, reference in zip(ours, theirs, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert float((gradient - reference).abs().max()) <= 0.01 * float(reference.abs().max())


# --- what needs no gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
@pytest.mark.parametrize("frozen", ["head", "hidden", "both"])
def test_frozen_parts_get_no_gradient_and_the_others_the_same(limits: Limits, frozen: str) -> None:
    asked = Asked(0.6, BANNED, entropy=True)
    module, hidden, target, ids = made()
    full = gradients(loss(naive(module, hidden, target, asked, ids), asked), module, hidden)
    module, hidden, target, ids = made()
    module.requires_grad_(frozen == "hidden")
    hidden.requires_grad_(frozen == "head")
    total = loss(statistics(module, hidden, target, V, asked, ids, limits), asked)
    if frozen == "both":
        assert not total.requires_grad
        return
    found = gradients(total, module, hidden)
    expected = full[-1:] if frozen == "head" else full[:-1]
    assert len(found) == len(expected)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_without_gradient_the_values_have_the_same_bits(limits: Limits) -> None:
    asked = Asked(0.6, BANNED, entropy=True, full=True)
    module, hidden, target, ids = made()
    found = statistics(module, hidden, target, V, asked, ids, limits)
    with torch.no_grad():
        again = statistics(module, hidden, target, V, asked, ids, limits)
    for value, other in zip(found, again, strict=True):
        assert value is not None and other is not None
        assert torch.equal(value, other)
        assert value.requires_grad and not other.requires_grad


# --- bits, chunks and memory ------------------------------------------------------------------------------------------


def test_what_is_kept_and_how_big_blocks_are_changes_no_bit() -> None:
    asked = Asked(0.6, BANNED, entropy=True)
    ends = []
    for limits in (KEPT, AGAIN, SOME, replace(KEPT, block=4 * V), KEPT):
        module, hidden, target, ids = made(Capped)
        found = statistics(module, hidden, target, V, asked, ids, limits)
        values = [value.detach().clone() for value in found if value is not None]
        ends.append([*values, *gradients(loss(found, asked), module, hidden)])
    for end in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], end, strict=True))


@pytest.mark.parametrize(("limits", "calls"), [(PLAIN, 1), (WIDE, 1), (KEPT, 5), (SOME, 5 + 2), (AGAIN, 5 + 5)])
def test_logits_beyond_the_limit_are_made_again(limits: Limits, calls: int) -> None:
    module, hidden, target, _ = made()
    total = loss(statistics(module, hidden, target, V, Asked(), None, limits), Asked())
    total.backward()  # type: ignore[no-untyped-call]
    assert module.calls == calls


def test_a_second_backward_pass_is_an_error_and_not_wrong() -> None:
    module, hidden, target, _ = made()
    total = loss(statistics(module, hidden, target, V, Asked(), None, KEPT), Asked())
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()  # type: ignore[no-untyped-call]


def test_full_logprobs_that_were_overwritten_are_an_error() -> None:
    module, hidden, target, _ = made()
    full = statistics(module, hidden, target, V, Asked(full=True), None, KEPT).full_logprobs_MV
    assert full is not None
    with torch.no_grad():
        full.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        full.sum().backward()  # type: ignore[no-untyped-call]


class Watch(TorchDispatchMode):
    """The most elements of a tensor that an operation made, and the most bytes of such that existed at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(result) if isinstance(x, Tensor)):
            storage = tensor.untyped_storage()
            held = storage.nbytes()  # a stand-in has the shape of many numbers, and one of them
            self.largest = max(self.largest, held // tensor.element_size())
            self.alive[storage._cdata] = (StorageWeakRef(storage), held)  # type: ignore[no-untyped-call]
        self.alive = {k: (ref, n) for k, (ref, n) in self.alive.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(n for _, n in self.alive.values()))
        return result


def watched(limits: Limits | None, asked: Asked, topk: bool) -> Watch:
    """Forward and backward of 64 tokens, hidden size 2, vocabulary 1000; None: the naive way."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 2, generator=draw, requires_grad=True)
    hidden = torch.randn(64, 2, generator=draw, requires_grad=True)
    target = torch.randint(1000, (64,), generator=draw)
    ids = torch.arange(64 * 3).view(64, 3) if topk else None

    def head(x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)

    watch = Watch()
    with watch:
        if limits is None:
            found = naive(head, hidden, target, asked, ids)
        else:
            found = statistics(head, hidden, target, 1000, asked, ids, limits)
        loss(found, asked).backward()  # type: ignore[no-untyped-call]
    return watch


ROW, CHUNK = 1000 * 4, 8 * 1000 * 4
"""Bytes of logits of one token, and of a chunk."""
SMALL = Limits(chunk=8 * 1000, block=2 * 1000, kept=0)


@pytest.mark.parametrize("asked", [Asked(), Asked(0.6, BANNED, entropy=True)], ids=["logprobs", "entropy"])
def test_memory_is_bounded(asked: Asked) -> None:
    """Eight chunks of eight tokens, blocks of two. Beside logits: a block's few tensors, weights' gradients."""
    everything = 64 * ROW
    again = watched(SMALL, asked, topk=True)
    assert again.largest == 8 * 1000
    assert again.peak <= CHUNK + 14 * ROW + 4 * 2 * ROW < 0.5 * everything
    for kept in (2, 8):
        some = watched(replace(SMALL, kept=kept * CHUNK), asked, topk=True)
        assert some.largest == 8 * 1000
        assert kept * CHUNK <= some.peak <= again.peak + kept * CHUNK
    assert watched(None, asked, topk=True).peak >= 3 * everything


def test_full_logprobs_exist_once() -> None:
    """Besides the output there are, from the loss of this test, its weights and the output's gradient."""
    everything, asked = 64 * ROW, Asked(full=True)
    found = watched(SMALL, asked, topk=False)
    assert found.largest == 64 * 1000
    plain = watched(None, asked, topk=False)
    assert found.peak <= plain.peak - 0.8 * everything


def test_full_logprobs_are_freed_without_the_collector() -> None:
    module, hidden, target, _ = made()
    gc.disable()
    try:
        found = statistics(module, hidden, target, V, Asked(full=True), None, KEPT)
        assert found.full_logprobs_MV is not None
        storage = StorageWeakRef(found.full_logprobs_MV.untyped_storage())  # type: ignore[no-untyped-call]
        found.full_logprobs_MV.sum().backward()  # type: ignore[no-untyped-call]
        del found
        assert storage.expired()  # type: ignore[no-untyped-call]
    finally:
        gc.enable()


def test_limits_depend_on_the_type_of_device_alone() -> None:
    assert limits_of(torch.device("cuda", 0)) == limits_of(torch.device("cuda", 1)) != limits_of(torch.device("cpu"))


def test_a_grid_of_sampled_tokens_alone_is_no_copy() -> None:
    values = torch.arange(12.0).view(6, 2)
    for cells, same in (
        (np.arange(6), True),
        (np.array([0, 1, 2, 5, 4, 3]), False),
        (np.array([0, 1, 2, 3, 4]), False),
    ):
        layout: Any = SimpleNamespace(grid=(2, 3), cell_M=cells)
        given = values[: len(cells)]
        grid = States(given, given, torch.from_numpy(cells), layout).on_grid(given)
        expected = torch.zeros(6, 2)
        expected[cells] = given
        assert torch.equal(grid, expected.view(2, 3, 2))
        assert (grid.data_ptr() == values.data_ptr()) == same
