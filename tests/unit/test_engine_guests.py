"""Several clients of one engine process: its owner and guests, each with an order, media and parties of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Request
from relax_core.remote.process import GuestEngine, ProcessEngine
from relax_core.testing.engines import TinyBuilder, changed_weights, request
from relax_core.testing.processes import ENDLESS, CountingBuilder
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.two_turns import play, plays, stored
from relax_core.transports import SharedTransport
from relax_core.types import Encoded, MediaRef, Version
from relax_core.weights import Manifest, WeightUpdate

pytestmark = pytest.mark.timeout(110)

NOTHING = WeightUpdate(Manifest(Version(0, 1), ()), stored)  # type: ignore[arg-type]  # never read


def about(*keys: str, new: int = 8) -> Request:
    media = tuple(MediaRef("image", key, i, 1) for i, key in enumerate(keys))
    return request("about", Encoded([3] * (len(keys) + 2), media), new)


def with_guest(test: Callable[[ProcessEngine, GuestEngine], Awaitable[None]], builder: Any, **settings: Any) -> None:
    async def main() -> None:
        owner = ProcessEngine(builder, stored(), guests=True)
        await owner.start()
        assert owner.address is not None
        guest = GuestEngine(owner.address, stored(), **settings)
        try:
            await guest.start()
            await test(owner, guest)
        finally:
            await guest.stop()
            await owner.stop()
        assert owner.address is None
        assert not Path(guest.address).exists()

    asyncio.run(main())


async def gauge(engine: ProcessEngine, name: str, value: float) -> None:
    """Until a gauge has this value."""
    deadline = time.monotonic() + 10
    while (found := (await engine.health())[name]) != value:
        assert time.monotonic() < deadline, f"{name} is {found}"
        await asyncio.sleep(0.01)


def test_a_guest_comes_and_goes_without_a_trace() -> None:
    async def test(owner: ProcessEngine, guest: GuestEngine) -> None:
        early = asyncio.create_task(guest.generate(about("red", "green")))
        await guest.settled()
        assert (await owner.health())["running"] == 0  # it waits for weights
        assert not early.done()
        await owner.load_weights(NOTHING)
        assert (await early).ids == [4, 1, 2]
        assert (await owner.generate(about("red", "blue"))).ids == [4, 1, 4]

        for _ in range(2):
            owner.enter("train")
        await owner.settled()
        for _ in range(3):
            guest.enter("train")
        guest.leave("train")
        await guest.settled()
        assert (await owner.health())["entered"] == 4
        endless = asyncio.create_task(guest.generate(about("red", new=ENDLESS)))
        await gauge(owner, "running", 1)

        await guest.stop()
        with pytest.raises(EngineError, match="request lost: it was disconnected"):
            await endless
        await gauge(owner, "running", 0)
        assert (await owner.health())["entered"] == 2
        assert (await owner.generate(about("red", "blue"))).ids == [4, 1, 4]  # its own media are still there
        with pytest.raises(EngineError, match="it was disconnected; start it again"):
            await guest.health()
        await guest.start()
        assert (await guest.generate(about("red", "green"))).ids == [4, 1, 2]  # brought again
        assert (await owner.health())["entered"] == 4

    with_guest(test, CountingBuilder())


def test_a_guest_finds_the_restarted_engine_and_waits_until_it_has_weights() -> None:
    async def test(owner: ProcessEngine, guest: GuestEngine) -> None:
        await owner.load_weights(NOTHING)
        owner.enter("train")
        guest.enter("eval")
        waiting = asyncio.create_task(guest.generate(about("red", new=ENDLESS)))
        await gauge(owner, "running", 1)
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="its process ended"):
            await waiting
        again = asyncio.create_task(guest.start())
        await asyncio.sleep(0.3)
        assert not again.done()
        await owner.start()
        await again
        served = asyncio.create_task(guest.generate(about("red")))
        await guest.settled()
        assert (await owner.health())["entered"] == 2
        assert not served.done()
        await owner.load_weights(NOTHING)
        assert (await served).ids == [3, 1]

    with_guest(test, CountingBuilder())


def test_a_guest_gives_up_when_nobody_restarts_the_engine() -> None:
    async def test(owner: ProcessEngine, guest: GuestEngine) -> None:
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"nobody listens at .* after 0.3 s"):
            await guest.start()

    with_guest(test, CountingBuilder(), patience_s=0.3)


GUEST = """
import asyncio, os, signal, sys
from relax_core.remote.process import GuestEngine
from relax_core.testing.engines import request
from relax_core.testing.two_turns import stored
from relax_core.testing.processes import ENDLESS

async def main():
    e = GuestEngine(sys.argv[1], stored())
    await e.start()
    e.enter("train")
    task = asyncio.create_task(e.generate(request("busy", [3], ENDLESS)))
    await e.settled()
    print("entered", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_guest_leaves_no_party_and_no_request(tmp_path: Path) -> None:
    script = tmp_path / "guest.py"
    script.write_text(GUEST)

    async def test(owner: ProcessEngine, guest: GuestEngine) -> None:
        await owner.load_weights(NOTHING)
        with subprocess.Popen([sys.executable, str(script), guest.address], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            await asyncio.to_thread(other.stdout.readline)
            assert (await owner.health()) == {"running": 1.0, "entered": 1.0}
            other.kill()
        await gauge(owner, "running", 0)
        assert (await owner.health())["entered"] == 0

    with_guest(test, CountingBuilder())


def test_plays_of_two_clients_have_the_bits_of_one() -> None:
    """The owner enters; once that is settled, whoever plays may ask a deterministic engine in any order."""
    builder = TinyBuilder({"images": True}, {"max_rows": 4}, seed=3, deterministic=True)
    import torch

    tensors = changed_weights(tiny_adapter(images=True).load("cpu", torch.float32), 0, 0.1)

    async def test(owner: ProcessEngine, guest: GuestEngine) -> None:
        transport = SharedTransport(SharedTransport.Config())
        try:
            await owner.load_weights(transport.publish(Version(0, 1), tensors))
            alone = await plays(owner)
            for _ in range(7):
                owner.enter("train")
            await owner.settled()
            played: list[list[Completion]] = await asyncio.gather(
                *(play(guest if member % 3 else owner, member, owner) for member in range(7))
            )
            assert played == alone
        finally:
            transport.close()

    with_guest(test, builder)
