"""Lives of a real server: what is left of it, how its death is noticed, and what comes back after it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from relax_core.errors import EngineError
from relax_core.interfaces import Completion
from relax_core.router import Router
from relax_core.setup import EngineSetup
from relax_core.testing.engines import request
from relax_core.testing.tiny import tiny_adapter
from relax_core.torch.plain import full_logprobs
from relax_core.transports import SharedTransport
from relax_core.types import Version
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.engine import SglangEngine


def pid_of(engine: SglangEngine) -> int:
    """Of SGLang's own main process."""
    life = engine.alive()
    assert life.server is not None and life.server.pid is not None
    (server,) = psutil.Process(life.server.pid).children()
    return int(server.pid)


def changed(model: torch.nn.Module, seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(n, p.detach() + 0.1 * torch.randn(p.shape, generator=generator)) for n, p in model.named_parameters()]


def test_a_killed_server_is_started_again_with_the_current_weights_and_no_request_is_lost(
    python: Path, tmp_path: Path
) -> None:
    adapter = tiny_adapter(max_positions=2048)
    adapter.stop_ids, adapter.banned_token_ids = frozenset({1}), (0, 1, 2)  # replies go to their limit
    engine = SglangEngine(
        SglangConfig(python=python, device="cpu", dtype="float32"), EngineSetup(adapter, 0, False, tmp_path)
    )
    notes: list[str] = []
    router = Router([engine], notes.append)
    model = adapter.load("cpu", torch.float32)
    weights = changed(model, 1)
    transport = SharedTransport(SharedTransport.Config())

    async def main() -> list[Completion]:
        await router.start()
        try:
            await router.load_weights(transport.publish(Version(0, 7), weights))
            requests = [request(f"r-{i}", [3 + i % 20, 4, 5], 400) for i in range(32)]
            tasks = [asyncio.create_task(router.generate(r)) for r in requests]
            while (await engine.health())["server/num_running_reqs"] < 32:
                await asyncio.sleep(0.05)
            old = psutil.Process(pid_of(engine)).children(recursive=True)
            began = time.monotonic()
            os.kill(pid_of(engine), signal.SIGKILL)
            while not notes:
                await asyncio.sleep(0.01)
            assert time.monotonic() - began < 5
            replies = await asyncio.gather(*tasks)
            assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in old)
            return replies
        finally:
            await router.stop()
            transport.close()

    replies = asyncio.run(asyncio.wait_for(main(), 240))
    assert "its 32 requests go elsewhere" in notes[0] and "signal 9" in notes[0], notes
    assert router.restarts == 1 and router.resent == 32
    with torch.no_grad():
        for (_, parameter), (_, new) in zip(model.named_parameters(), weights, strict=True):
            parameter.copy_(new)
    for i, reply in enumerate(replies):
        assert len(reply.ids) == 400 and set(reply.versions) == {Version(0, 7)}
        wanted = full_logprobs(adapter, model, request("", [3 + i % 20, 4, 5]).prompt, reply.ids)
        assert max(abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True)) < 1e-3


PARENT = """
import asyncio, sys
from pathlib import Path
from relax_core.setup import EngineSetup
from relax_core.testing.tiny import tiny_adapter
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.engine import SglangEngine

async def main():
    config = SglangConfig(python=sys.argv[1], device="cpu")
    engine = SglangEngine(config, EngineSetup(tiny_adapter(), 0, False, Path(sys.argv[2])))
    await engine.start()
    print(engine.alive().server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_process_that_wanted_it_is_killed(python: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(python), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            guard = psutil.Process(int(parent.stdout.readline()))
            tree = [guard, *guard.children(recursive=True)]
            assert len(tree) >= 4, tree  # guard, server, scheduler, detokenizer
        finally:
            parent.kill()
    gone, alive = psutil.wait_procs(tree, timeout=10)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"left: {alive}"
    assert len(gone) + len(alive) <= len(tree)


def test_a_server_that_does_not_start_says_why(python: Path, tmp_path: Path) -> None:
    config = SglangConfig(python=python, device="cpu", arguments={"no_such_flag": True})
    engine = SglangEngine(config, EngineSetup(tiny_adapter(), 0, False, tmp_path))
    with pytest.raises(EngineError) as failed:
        asyncio.run(asyncio.wait_for(engine.start(), 120))
    assert "ended with exit code 2" in str(failed.value) and "--no-such-flag" in str(failed.value)
    assert str(tmp_path / "logs" / "engine-server.log") in str(failed.value)


def test_a_server_that_takes_too_long_is_ended(python: Path, tmp_path: Path) -> None:
    config = SglangConfig(python=python, device="cpu", start_s=1.0)
    engine = SglangEngine(config, EngineSetup(tiny_adapter(), 0, False, tmp_path))
    others = set(psutil.Process().children(recursive=True))  # servers of other tests
    with pytest.raises(EngineError, match=r"was not ready after 1 s; raise engine\.start_s"):
        asyncio.run(asyncio.wait_for(engine.start(), 60))
    assert not set(psutil.Process().children(recursive=True)) - others
