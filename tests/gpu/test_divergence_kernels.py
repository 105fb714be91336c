"""The GPU's kernels for divergences give what the written formulas give. Legend: N tokens, V vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relax_algorithms.divergence import Kind, with_reverse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def computed(device: str, kind: Kind, masked: bool) -> list[torch.Tensor]:
    """The divergence, the reverse one, and the student's gradient; some tokens are banned, masked ones hold NaN."""
    generator = torch.Generator().manual_seed(0)
    logits: Any = [torch.randn(3, 40, 5000, generator=generator) * 2 for _ in range(2)]
    student, teacher = (x.index_fill(-1, torch.tensor([3, 4]), -1e9).log_softmax(-1) for x in logits)
    mask = torch.rand(3, 40, generator=generator) < 0.7
    scale = torch.randn(3, 40, generator=generator)
    if masked:
        student[~mask] = float("nan")
    student, teacher = student.to(device).requires_grad_(), teacher.to(device)
    found, against = with_reverse(kind, student, teacher, 0.3, mask.to(device) if masked else None)
    (found * scale.to(device)).sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    return [x.detach().cpu() for x in (found, against, student.grad)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_kernels_agree(kind: Kind, masked: bool) -> None:
    for found, expected in zip(computed("cuda", kind, masked), computed("cpu", kind, masked), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
