"""Two ranks on two GPUs over NCCL train what one GPU trains. Real processes; this file is also their program."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Cut
from relax_core.setup import TrainerSetup
from relax_core.testing.gradients import banning, rows_of_lengths
from relax_core.testing.ranks import run_ranks
from relax_core.testing.training import tiny_run
from relax_core.torch.config import TrainerConfig
from relax_core.torch.ranks import ALONE, Ranks, join, leave
from relax_core.torch.trainer import TorchTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROWS = rows_of_lengths([3, 1, 9, 4, 2, 6, 7, 8])


def trained(ranks: Ranks, sharding: str) -> dict[str, torch.Tensor]:
    """The weights after three steps; the second has an empty rank, the third nothing but one row."""
    config = TrainerConfig(device="cuda", dtype="float32", lr=1e-2, eps=1e-2, sharding=sharding)  # type: ignore[arg-type]
    trainer = TorchTrainer(config, TrainerSetup(banning(), tiny_run(), ranks=ranks))
    for number, rows in enumerate((ROWS, ROWS[:1], ROWS[2:])):

        async def plan(rows: list[object] = list(rows)) -> AsyncIterator[Cut]:  # noqa: B006
            half = len(rows) // 2
            yield Cut(rows[:half], last=False)  # type: ignore[arg-type]
            yield Cut(rows[half:], last=True)  # type: ignore[arg-type]

        asyncio.run(trainer.step(number, plan() if ranks.first else None, Grpo(Grpo.Config())))
    return {name: tensor.cpu().clone() for name, tensor in trainer.weights()}


@pytest.mark.timeout(170)
@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_two_gpus_train_what_one_trains(tmp_path: Path, sharding: str) -> None:
    run_ranks(Path(__file__), tmp_path, sharding, timeout=160)
    own, found = trained(ALONE, "replicate"), torch.load(tmp_path / "weights.pt")
    for name, tensor in own.items():
        assert torch.allclose(tensor, found[name], atol=2e-6), (name, (tensor - found[name]).abs().max())


def _rank(rank: int, folder: str, sharding: str, address: str) -> None:
    torch.cuda.set_device(rank)
    ranks = join(rank, 2, address, "cuda", 120)
    weights = trained(ranks, sharding)
    if rank == 0:
        torch.save(weights, Path(folder) / "weights.pt")
    leave()


if __name__ == "__main__":
    import socket

    from torch.multiprocessing.spawn import spawn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(  # type: ignore[no-untyped-call]
        _rank, (sys.argv[1], sys.argv[2], f"tcp://127.0.0.1:{port}"), nprocs=2
    )
