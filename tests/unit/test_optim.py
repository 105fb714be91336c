"""Learning rates by step, decay of matrices alone, and masters of half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relax_core.torch.config import TrainerConfig
from relax_core.torch.optim import Optimizer, learning_rate, named_tensors


def config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 0.1, **settings})


def rates(steps: int, **settings: Any) -> list[float]:
    return [round(learning_rate(config(**settings), step, steps), 6) for step in range(steps)]


def test_warm_up_rises_to_the_rate_and_constant_stays() -> None:
    assert rates(5, warmup_steps=2) == [0.05, 0.1, 0.1, 0.1, 0.1]


def test_linear_and_cosine_end_at_their_minimum() -> None:
    assert rates(5, schedule="linear") == [0.1, 0.075, 0.05, 0.025, 0.0]
    assert rates(6, schedule="linear", warmup_steps=1, min_lr_ratio=0.2) == [0.1, 0.1, 0.08, 0.06, 0.04, 0.02]
    cosine = rates(5, schedule="cosine", min_lr_ratio=0.5)
    assert cosine[0] == 0.1
    assert cosine[2] == pytest.approx(0.075)
    assert cosine[4] == 0.05
    assert cosine == sorted(cosine, reverse=True)


def test_a_run_of_one_step_has_its_rate() -> None:
    assert rates(1, schedule="cosine") == [0.1]
    assert learning_rate(config(schedule="linear"), 9, 5) == 0.0  # beyond the end it stays


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.matrix = torch.nn.Linear(3, 2, bias=False)
        self.norm = torch.nn.LayerNorm(2)
        self.tied = torch.nn.Linear(3, 2, bias=False)
        self.tied.weight = self.matrix.weight
        self.register_buffer("table", torch.arange(3.0))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.matrix(x))
        return found


def test_an_update_has_the_rate_of_its_step() -> None:
    moved = []
    for step in (0, 4):
        model = Model()
        optimizer = Optimizer(model, config(warmup_steps=5), 10)
        before = model.matrix.weight.detach().clone()
        model.matrix.weight.grad = torch.ones(2, 3)
        optimizer.update(step)
        moved.append(float((before - model.matrix.weight).detach().mean()))
    assert moved == pytest.approx([0.02, 0.1], rel=1e-4)  # AdamW's first step is the rate itself


def test_norms_and_biases_do_not_decay() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, config(weight_decay=0.5), 10)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.update(0)
    assert torch.allclose(model.matrix.weight, before["matrix.weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.norm.weight, before["norm.weight"])
    assert torch.equal(model.norm.bias, before["norm.bias"])


def test_reduce_divides_then_clips_and_gives_the_norm_before() -> None:
    model = Model()
    optimizer = Optimizer(model, config(clip=1.0), 10)
    model.matrix.weight.grad = torch.full((2, 3), 6.0)
    norm = 6 * 6**0.5 / 3
    assert optimizer.reduce(3.0) == pytest.approx(norm)
    assert torch.allclose(model.matrix.weight.grad, torch.full((2, 3), 2.0) / norm)
    model.matrix.weight.grad = torch.full((2, 3), 0.3)
    assert optimizer.reduce(3.0) == pytest.approx(0.1 * 6**0.5)
    assert torch.allclose(model.matrix.weight.grad, torch.full((2, 3), 0.1))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_reduce_leaves_what_cannot_be_scaled(value: float) -> None:
    model = Model()
    optimizer = Optimizer(model, config(), 10)
    model.matrix.weight.grad = torch.full((2, 3), value)
    assert str(optimizer.reduce(2.0)) == str(value)
    assert torch.equal(model.matrix.weight.grad, torch.full((2, 3), value)) or value != value


def test_half_precision_sums_gradients_in_float32() -> None:
    model = Model(torch.bfloat16)
    optimizer = Optimizer(model, config(clip=None), 10)
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    for scale in (1.0, 2.0**-10):  # in bfloat16 the second would vanish beside the first
        (model.norm.bias.sum() * scale + 0 * model(x).sum()).backward()
    assert optimizer.masters()["norm.bias"].dtype == torch.float32
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.reduce(1.0) == pytest.approx((1 + 2.0**-10) * 2**0.5, rel=1e-6)


def test_names_come_once_and_buffers_too() -> None:
    assert [name for name, _ in named_tensors(Model())] == ["table", "matrix.weight", "norm.weight", "norm.bias"]
