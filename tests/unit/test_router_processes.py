"""The router over real engine processes, one of which is killed in the middle of its requests."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.interfaces import Completion, Engine, Pool, Request
from relax_core.media import MediaStore
from relax_core.remote.process import ProcessEngine
from relax_core.router import Router
from relax_core.testing.engines import TinyBuilder, changed_weights, request
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.two_turns import stored
from relax_core.torch.engine import TorchEngine
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


@dataclass(frozen=True)
class MortalBuilder(TinyBuilder):
    """Builds an engine whose process is killed at work: once the file ``mark`` is there, with rows half sampled."""

    mark: Path = Path()

    def __call__(self) -> tuple[Engine, MediaStore]:
        engine, media = super().__call__()
        assert isinstance(engine, TorchEngine)
        step = engine._step

        def mortal(pool: Pool) -> None:
            step(pool)
            decoder = engine.decoder
            if decoder is not None and decoder.running("train") and self.mark.exists():
                self.mark.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        engine._step = mortal  # type: ignore[method-assign]
        return engine, media


async def played(router: Router) -> list[Completion]:
    return await asyncio.gather(*(router.generate(r) for r in requests()))


def test_what_a_killed_engine_was_sampling_is_sampled_again_with_the_same_ids_and_weights(tmp_path: Path) -> None:
    async def main() -> None:
        mark, size = tmp_path / "mark", {"max_rows": 4}
        builders = (MortalBuilder(SETTINGS, size, seed=3, mark=mark), TinyBuilder(SETTINGS, size, seed=3))
        engines = [ProcessEngine(builder, stored()) for builder in builders]
        notes: list[str] = []
        router = Router(engines, notes.append)
        transport = SharedTransport(SharedTransport.Config())
        weights = changed_weights(tiny_adapter(**SETTINGS).load("cpu", torch.float32), 0, 0.1)
        await router.start()
        try:
            assert router.exact_versions
            await router.load_weights(transport.publish(Version(0, 1), weights))
            undisturbed = await played(router)
            transport.close()  # from now on only the living engine has them
            mark.touch()
            disturbed = await played(router)
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
