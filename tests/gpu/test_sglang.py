"""The real SGLang server on a GPU keeps an engine's promises: asleep and killed, in bfloat16, with CUDA graphs.

``RELAX_SGLANG_PYTHON`` names the environment that has SGLang; default: this one, if it does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from relax_core.setup import EngineSetup
from relax_core.testing import check_engine
from relax_core.testing.engines import request
from relax_core.testing.tiny import tiny_adapter
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.engine import SglangEngine

PYTHON = os.environ.get("RELAX_SGLANG_PYTHON") or (sys.executable if find_spec("sglang") else None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(PYTHON is None, reason="needs an environment with SGLang"),
    pytest.mark.timeout(600),
]
ADAPTER: dict[str, Any] = {"hidden": 512, "heads": 4, "std": 0.02, "max_positions": 2048}


def config(**settings: Any) -> SglangConfig:
    """Of a server that needs no kernels beyond SGLang's own."""
    arguments: dict[str, Any] = {
        "attention_backend": "triton",
        "disable_flashinfer_autotune": True,
        "mem_fraction_static": 0.1,
        "cuda_graph_max_bs": 64,
        "max_running_requests": 128,
    }
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} if sys.executable == PYTHON else {}
    return SglangConfig(python=Path(str(PYTHON)), device="cuda", arguments=arguments, environment=path, **settings)


def kill(engine: Any) -> None:
    """SIGKILL to SGLang's own main process."""
    (server,) = psutil.Process(engine.alive().server.pid).children()
    os.kill(server.pid, signal.SIGKILL)


def test_it_keeps_the_promises_of_an_engine() -> None:
    check_engine(
        lambda setup: SglangEngine(config(memory_saver=True), setup),
        adapter=tiny_adapter(**ADAPTER),
        kill=kill,
        dtype="bfloat16",
        limit_s=240,
        long=1024,
    )


def test_deterministic_draws_are_those_of_the_keys() -> None:
    """The same requests again, in other company: the same ids, and the same log-probs to the bit."""

    async def main() -> None:
        engine = SglangEngine(config(deterministic=True), EngineSetup(tiny_adapter(**ADAPTER), 3, False))
        await engine.start()
        try:
            asked = [request(f"r-{i}", [3 + i % 20, 4, 5], 60) for i in range(24)]
            together = await asyncio.gather(*(engine.generate(one) for one in asked))
            alone = [await engine.generate(one) for one in asked[:6]]
        finally:
            await engine.stop()
        for first, again in zip(together, alone, strict=False):
            assert again.ids == first.ids
            assert again.logprobs == first.logprobs
        assert len({tuple(reply.ids) for reply in together}) > 20, "keys differ, and so must draws"

    asyncio.run(asyncio.wait_for(main(), 300))
