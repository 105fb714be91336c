"""Main memory for what leaves a GPU: every bit comes back, one block serves again, and a divided model moves whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Cut
from relax_core.testing.gradients import banning, rows_of_lengths
from relax_core.testing.training import tiny_trainer
from relax_core.torch.host_memory import HostMemory


def some() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 5, generator=generator).bfloat16(),
        torch.tensor(7.0, dtype=torch.float64),
        torch.randn(4, 6, generator=generator).T,
        torch.zeros(0, 3),
        torch.tensor([True, False, True]),
        torch.arange(9)[2:],
    ]


def test_copies_have_the_same_bits_shapes_and_dtypes() -> None:
    tensors = some()
    put = HostMemory().room(tensors)
    for tensor, copy in zip(tensors, [put(tensor) for tensor in tensors], strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
        assert copy.is_contiguous() and (copy.data_ptr() != tensor.data_ptr() or not tensor.numel())


def test_the_block_is_kept_and_written_over() -> None:
    memory, tensors = HostMemory(), some()
    first = memory.room(tensors)(tensors[0])
    second = memory.room(tensors[:2])(tensors[0] + 1)
    assert first.data_ptr() == second.data_ptr() and torch.equal(first, tensors[0] + 1)


def test_more_room_is_another_block_and_old_copies_stay() -> None:
    memory = HostMemory()
    small = torch.ones(10)
    first = memory.room([small])(small)
    large = torch.full((1000,), 2.0)
    second = memory.room([large])(large)
    memory.release()
    assert first.tolist() == [1.0] * 10 and second.tolist() == [2.0] * 1000


def test_more_bytes_than_asked_for_are_an_error() -> None:
    put = HostMemory().room([torch.zeros(16)])
    put(torch.zeros(16))
    with pytest.raises(RuntimeError):
        put(torch.zeros(16))


async def one(cut: Cut) -> AsyncIterator[Cut]:
    yield cut


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_leaves_and_enters_with_its_bits(dtype: str, tmp_path: Path) -> None:
    trainer, twin = (tiny_trainer(banning(), lr=1e-2, dtype=dtype) for _ in range(2))
    rows, algorithm = rows_of_lengths([3, 1, 9, 4]), Grpo(Grpo.Config())
    for step in range(3):
        for each in (trainer, twin):
            asyncio.run(each.step(step, one(Cut(rows, last=True)), algorithm))
        before = {name: tensor.clone() for name, tensor in trainer.weights()}
        trainer.learner.leave()
        held = dict(trainer.weights())
        assert all(torch.equal(before[name], tensor) for name, tensor in held.items())
        trainer.learner.save(tmp_path / str(step))
        trainer.learner.enter("cpu")
    for (name, tensor), (_, other) in zip(trainer.weights(), twin.weights(), strict=True):
        assert torch.equal(tensor, other), name
