"""Engine and trainer on one GPU: the one that sleeps gives its memory back, and nothing else changes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Cut
from relax_core.setup import EngineSetup, TrainerSetup
from relax_core.testing.engines import request
from relax_core.testing.gradients import banning, rows_of_lengths
from relax_core.testing.runs import accounted, metrics, run_file, summary, train
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import tiny_run
from relax_core.torch.config import EngineConfig, TrainerConfig
from relax_core.torch.engine import TorchEngine
from relax_core.torch.trainer import TorchTrainer
from relax_core.transports import CopyTransport
from relax_core.types import Version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Matrix products take a workspace at their first call, forward and backward, and keep it."""
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        (one @ one).sum().backward()  # type: ignore[no-untyped-call]


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


async def one(cut: Cut) -> AsyncIterator[Cut]:
    yield cut


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sleeping_trainer_holds_no_memory_and_wakes_with_its_bits(dtype: str) -> None:
    before = allocated()
    config = TrainerConfig(device="cuda", dtype=dtype, lr=1e-3)  # type: ignore[arg-type]
    trainer = TorchTrainer(config, TrainerSetup(banning(hidden=512, layers=4), tiny_run()))
    rows = rows_of_lengths([3, 1, 9, 4])
    algorithm = Grpo(Grpo.Config())
    asyncio.run(trainer.step(0, one(Cut(rows, last=True)), algorithm))
    awake = allocated() - before
    assert sum(trainer.memory().values()) > 10 * MIB and awake > 10 * MIB
    bits = {name: tensor.cpu().clone() for name, tensor in trainer.weights()}
    asyncio.run(trainer.sleep())
    asleep = allocated() - before
    assert asleep < 0.05 * awake and sum(trainer.memory().values()) == 0, (asleep, awake)
    asyncio.run(trainer.wake())
    assert all(torch.equal(bits[name], tensor.cpu()) for name, tensor in trainer.weights())
    asyncio.run(trainer.step(1, one(Cut(rows, last=True)), algorithm))
    assert any(not torch.equal(bits[name], tensor.cpu()) for name, tensor in trainer.weights())


def test_a_sleeping_engine_holds_no_memory_and_goes_on_where_it_was() -> None:
    async def main() -> None:
        before = allocated()
        adapter = tiny_adapter(hidden=512, layers=4)
        engine = TorchEngine(EngineConfig(device="cuda", dtype="float32"), EngineSetup(adapter, 0, False))
        await engine.start()
        weights = list(adapter.load("cuda", torch.float32).named_parameters())
        await engine.load_weights(CopyTransport(CopyTransport.Config()).publish(Version(0, 1), weights))
        del weights
        first = await engine.generate(request("a", [3, 4, 5], 6))
        awake = allocated() - before
        await engine.sleep()
        asleep = allocated() - before
        waiting = asyncio.create_task(engine.generate(request("a", [3, 4, 5], 6)))
        await asyncio.sleep(0.05)
        assert not waiting.done() and awake > 5 * MIB and asleep < 0.6 * awake, (asleep, awake)
        await engine.wake()
        assert (await waiting).ids == first.ids
        await engine.stop()

    asyncio.run(main())


def test_turns_on_a_gpu_train_what_a_resident_pair_trains(tmp_path: Path) -> None:
    both = {"trainer": {"lr": 1e-3, "dtype": "float32"}, "engine": {"dtype": "float32"}, "evaluation": []}
    resident = metrics(train(run_file(tmp_path / "resident", **both)))
    directory = train(run_file(tmp_path / "shared", runtime={"id": "local", "placement": "colocate"}, **both))
    assert accounted(summary(directory)["groups"])
    for one_line, other in zip(metrics(directory), resident, strict=True):
        assert one_line["reward"] == pytest.approx(other["reward"], abs=0.1)
