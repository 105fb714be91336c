"""The GPU's kernels give what tensor operations give. Legend: M tokens, H hidden size, V vocabulary."""

from __future__ import annotations

import pytest
import torch

from relax_core.torch.logprobs import Asked, Limits, statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def computed(
    dtype: torch.dtype, asked: Asked, limits: Limits, vocab: int, rows: int = 301, topk: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs, entropies and log-probs of given ids, and the gradients of hidden states and head."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_MH = torch.randn(rows, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
    head_VH = (torch.randn(vocab, 64, device="cuda", generator=generator) / 4).to(dtype).requires_grad_()
    target_M = torch.randint(100, vocab, (rows,), device="cuda", generator=generator)
    ids_MK = torch.randint(0, vocab, (rows, 7), device="cuda", generator=generator) if topk else None
    if ids_MK is not None:
        ids_MK[:, 0] = 1  # banned in some cases
    made = statistics(lambda x: x @ head_VH.T, hidden_MH, target_M, vocab, asked, ids_MK, limits=limits)
    weights_M = torch.randn(rows, device="cuda", generator=generator)
    total = (made.logprobs_M * weights_M).sum()
    values = [made.logprobs_M.detach()]
    if made.entropy_M is not None:
        total = total - 0.3 * (made.entropy_M * weights_M.abs()).sum()
        values.append(made.entropy_M.detach())
    if made.topk_logprobs_MK is not None:
        spread_MK = torch.randn(rows, 7, device="cuda", generator=generator)
        total = total + (made.topk_logprobs_MK.clamp(min=-1e3) * spread_MK).sum()
        values.append(made.topk_logprobs_MK.detach())
    if made.full_logprobs_MV is not None:
        probable = made.full_logprobs_MV.detach() > -1e3
        total = total + (made.full_logprobs_MV.exp() * weights_M[:, None]).square().sum()
        values.append(made.full_logprobs_MV.detach()[probable])
    total.backward()  # type: ignore[no-untyped-call]
    assert hidden_MH.grad is not None and head_VH.grad is not None
    return values, [hidden_MH.grad, head_VH.grad]


@pytest.mark.parametrize("vocab", [600, 32000, 151937])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bans", [0, 5])
@pytest.mark.parametrize(("entropy", "topk"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree(
    dtype: torch.dtype, entropy: bool, topk: bool, bans: int, temperature: float, vocab: int
) -> None:
    banned = torch.arange(bans, device="cuda") if bans else None
    asked = Asked(temperature=temperature, banned=banned, entropy=entropy)
    plain = Limits(chunk=1 << 40, block=1 << 40, kept=1 << 40, plain=1 << 40)
    some = Limits(chunk=64 * vocab, block=1 << 24, kept=100 * vocab * 4, plain=0)  # chunks, some kept, some made again
    values, gradients = computed(dtype, asked, plain, vocab, topk=topk)
    found, made = computed(dtype, asked, some, vocab, topk=topk)
    for a, b in zip(found, values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    for a, b in zip(made, gradients, strict=True):
        scale = b.float().abs().max()
        assert ((a.float() - b.float()).abs().max() / scale).item() < bound


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bans", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_vocabulary_agrees(dtype: torch.dtype, bans: int, temperature: float) -> None:
    vocab = 32000
    asked = Asked(temperature=temperature, banned=torch.arange(bans, device="cuda") if bans else None, full=True)
    plain = Limits(chunk=1 << 40, block=1 << 40, kept=1 << 40, plain=1 << 40)
    values, gradients = computed(dtype, asked, plain, vocab)
    found, made = computed(dtype, asked, Limits(chunk=256 * vocab, block=1 << 20, kept=0, plain=0), vocab)
    for a, b in zip(found, values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(made, gradients, strict=True):
        scale = b.float().abs().max()
        assert ((a.float() - b.float()).abs().max() / scale).item() < (1e-5 if dtype is torch.float32 else 1e-2)
