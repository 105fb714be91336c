"""The router over real engine processes, one of which is killed in the middle of its requests."""

import asyncio
import os
import signal
from typing import Any

import pytest
import torch

from relax_core.interfaces import Completion, Request
from relax_core.remote.process import ProcessEngine
from relax_core.router import Router
from relax_core.testing.engines import TinyBuilder, changed_weights, request
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.two_turns import stored
from relax_core.transports import SharedTransport
from relax_core.types import Encoded, MediaRef, Version

pytestmark = pytest.mark.timeout(110)

SETTINGS: dict[str, Any] = {"images": True}


def requests() -> list[Request]:
    image = tiny_adapter(**SETTINGS).ids["<image>"]
    media = (MediaRef("image", "green", 0, 1),)
    return [
        request(f"p{i}", Encoded([image, 3, i % 8], media) if i % 2 else [3, 4, i % 8], 300, order=(i,))
        for i in range(32)
    ]


async def played(router: Router, kill: ProcessEngine | None) -> list[Completion]:
    before = (await router.health())["drawn_tokens"]
    tasks = [asyncio.create_task(router.generate(r)) for r in requests()]
    if kill is not None:
        while (await router.health())["drawn_tokens"] < before + 8:
            await asyncio.sleep(0)
        assert kill.pid is not None
        os.kill(kill.pid, signal.SIGKILL)  # at work: that its requests are asked again is counted below
    return await asyncio.gather(*tasks)


def test_what_a_killed_engine_was_sampling_is_sampled_again_with_the_same_ids_and_weights() -> None:
    async def main() -> None:
        builder = TinyBuilder(SETTINGS, {"max_rows": 4}, seed=3)
        engines = [ProcessEngine(builder, stored()) for _ in range(2)]
        notes: list[str] = []
        router = Router(engines, notes.append)
        transport = SharedTransport(SharedTransport.Config())
        weights = changed_weights(tiny_adapter(**SETTINGS).load("cpu", torch.float32), 0, 0.1)
        await router.start()
        try:
            assert router.exact_versions
            await router.load_weights(transport.publish(Version(0, 1), weights))
            undisturbed = await played(router, None)
            transport.close()  # from now on only the living engine has them
            disturbed = await played(router, engines[0])
            assert [c.ids for c in disturbed] == [c.ids for c in undisturbed]
            assert {v for c in disturbed for v in c.versions} == {Version(0, 1)}
            for one, other in zip(disturbed, undisturbed, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            while (await router.health())["serving"] < 2:
                await asyncio.sleep(0.05)
            gauges = await router.health()
            assert gauges["restarts"] == 1
            assert gauges["resent"] >= 1
            assert gauges["replicas/0/version"] == 1
            assert "ended with exit code -9" in notes[0]
        finally:
            await router.stop()

    asyncio.run(main())
