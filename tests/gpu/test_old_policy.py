"""A copy of the policy on a GPU says what the trainer on one says, to the bit for the same micro-batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_core.old_policy import TrainerItself
from relax_core.plugins import activate
from relax_core.run import Run
from relax_core.testing.gradients import banning, rows_of_lengths
from relax_core.testing.training import tiny_config, tiny_trainer
from relax_core.torch.policy_copy import PolicyCopy
from relax_core.transports import SharedTransport
from relax_core.types import Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS = rows_of_lengths([3, 1, 9, 4, 2, 6, 7, 8])
DEVICE = "cuda"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_it_says_what_the_trainer_says(dtype: str) -> None:
    async def test() -> None:
        run = Run(tiny_config(trainer={"id": "torch", "dtype": dtype}), Path("runs/tiny"), activate(()))
        adapter, version = banning(), Version(0, 0)
        trainer = tiny_trainer(adapter, run=run, device=DEVICE, dtype=dtype)
        old, transport = PolicyCopy(run, adapter), SharedTransport(SharedTransport.Config())
        assert old.annotator.compute.device.type == DEVICE
        await old.load_weights(transport.publish(version, trainer.weights(), trainer.frozen_names()))
        wanted = await TrainerItself(trainer).forward(ROWS, version)
        for own, found in zip(wanted, await old.forward(ROWS, version), strict=True):
            assert np.array_equal(own["logprobs"], found["logprobs"])
        transport.close()

    asyncio.run(test())
