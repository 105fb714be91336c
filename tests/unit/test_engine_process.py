"""The engine in a process of its own: the same bits, media once, weights by handle, and every kind of end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.errors import DataError, EngineError, PluginError, WeightsError
from relax_core.interfaces import Completion, Engine, Request
from relax_core.remote.process import ProcessEngine
from relax_core.remote.sent import SentMedia
from relax_core.remote.wire import restore
from relax_core.testing.engines import TinyBuilder, changed_weights, request
from relax_core.testing.living import lives
from relax_core.testing.processes import (
    ENDLESS,
    CountingBuilder,
    OddBuilder,
    RefusingBuilder,
    VanishingBuilder,
    check_what_cannot_travel,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.two_turns import IMAGE, plays, stored
from relax_core.transports import SharedTransport
from relax_core.types import Encoded, MediaRef, Stop, Version

pytestmark = pytest.mark.timeout(90)

SETTINGS: dict[str, Any] = {"images": True}
BUILDER = TinyBuilder(SETTINGS, {"max_rows": 4}, seed=3, deterministic=True)


def here(scenario: Callable[[Engine], Awaitable[Any]]) -> Any:
    """The scenario with the same engine in this process."""

    async def main() -> Any:
        e, media = BUILDER()
        for key in ("red", "green", "blue"):
            media.put(key, stored().get(key))
        await e.start()
        try:
            return await scenario(e)
        finally:
            await e.stop()

    return asyncio.run(main())


async def scenario(e: Engine) -> Any:
    """Plays, an abort with new weights in the middle, refused weights, plays again."""
    transport = SharedTransport(SharedTransport.Config())
    try:
        before = await plays(e)
        update = transport.publish(Version(0, 1), _weights())
        broken = replace(update, manifest=replace(update.manifest, tensors=update.manifest.tensors[:-1]))
        with pytest.raises(WeightsError, match=r"missing, first 'model.norm.weight'"):
            await e.load_weights(broken)
        assert (await e.health())["version"] == 0
        running = asyncio.create_task(e.generate(request("long", [3, 4], 480)))
        while not (await e.health())["running"]:
            await asyncio.sleep(0)
        await e.load_weights(update, "abort")
        aborted = await running
        return before, aborted, await plays(e), dict(await e.health())
    finally:
        transport.close()


def _weights() -> list[Any]:
    import torch

    return changed_weights(tiny_adapter(**SETTINGS).load("cpu", torch.float32), 0, 0.1)


def test_the_same_bits_as_in_this_process_through_plays_weights_and_aborts() -> None:
    before, aborted, after, _ = here(scenario)

    async def main() -> None:
        media = stored()
        e = ProcessEngine(BUILDER, media)
        await e.start()
        try:
            assert e.exact_versions
            there, their_aborted, later, health = await scenario(e)
            assert there == before
            assert later == after
            assert {v for play in later for c in play for v in c.versions} == {Version(0, 1)}
            # When the abort arrives is a matter of time; what was drawn until then is not.
            n = min(len(aborted.ids), len(their_aborted.ids))
            assert their_aborted.ids[:n] == aborted.ids[:n]
            assert aborted.stop in (Stop.ABORT, Stop.EOS)
            assert (health["running"], health["waiting"], health["version"]) == (0, 0, 1)
            with pytest.raises(EngineError, match="its prompt is empty"):
                await e.generate(request("bad", []))
            with pytest.raises(DataError, match="unknown"):
                await e.generate(request("lost", Encoded([IMAGE], (MediaRef("image", "unknown", 0, 1),))))
        finally:
            await e.stop()
        with pytest.raises(EngineError, match="it was stopped"):
            await e.health()

    asyncio.run(main())


def test_what_cannot_travel_or_be_read_is_an_error_and_nobody_waits_for_it() -> None:
    async def main() -> None:
        e = ProcessEngine(OddBuilder(), stored())
        await e.start()
        try:
            await check_what_cannot_travel(e)
        finally:
            await e.stop()

    asyncio.run(main())


def counting(media_bytes: int = 1 << 20) -> ProcessEngine:
    return ProcessEngine(CountingBuilder(), stored(), media_bytes)


def about(*keys: str, new: int = 8) -> Request:
    media = tuple(MediaRef("image", key, i, 1) for i, key in enumerate(keys))
    return request("about", Encoded([3] * (len(keys) + 2), media), new)


async def busy(e: ProcessEngine, count: int) -> list[asyncio.Task[Completion]]:
    """Requests that keep the child at work."""
    tasks = [asyncio.create_task(e.generate(about("red", new=ENDLESS))) for _ in range(count)]
    while (await e.health())["running"] < count:
        await asyncio.sleep(0)
    return tasks


def test_a_killed_child_fails_what_waits_and_a_new_start_serves_again() -> None:
    async def main() -> None:
        e = counting()
        await e.start()
        try:
            assert (await e.generate(about("red", "blue"))).ids == [4, 1, 4]
            for _ in range(3):
                e.enter("train")
            e.leave("train")
            assert (await e.health())["entered"] == 2
            tasks = await busy(e, 3)
            assert e.pid is not None
            os.kill(e.pid, signal.SIGKILL)
            for task in tasks:
                with pytest.raises(EngineError, match=r"its process \d+ ended with exit code -9"):
                    await task
            for call in (e.health(), e.generate(about("red"))):
                with pytest.raises(EngineError, match=r"exit code -9; start it again"):
                    await call
            await e.stop()
            await e.start()
            assert (await e.generate(about("red", "blue"))).ids == [4, 1, 4]  # its media were sent again
            assert (await e.health())["entered"] == 2  # and it knows who is at work
        finally:
            await e.stop()

    asyncio.run(main())


def test_features_reach_the_child_whatever_was_dropped_there_before() -> None:
    async def main() -> None:
        e = counting(media_bytes=12)  # one of them
        await e.start()
        try:
            for _ in range(2):
                for keys, sums in ((("red",), [1]), (("green", "blue"), [2, 4]), (("blue", "red"), [4, 1])):
                    assert (await e.generate(about(*keys))).ids[1:] == sums
            both = await asyncio.gather(e.generate(about("red", "green")), e.generate(about("blue", "red")))
            assert [c.ids[1:] for c in both] == [[1, 2], [4, 1]]
        finally:
            await e.stop()

    asyncio.run(main())


def test_stop_ends_a_busy_child_within_seconds_and_cancel_reaches_it() -> None:
    async def main() -> None:
        e = counting()
        await e.start()
        child = psutil.Process(e.pid)
        first, second = await busy(e, 2)
        first.cancel()
        while (await e.health())["running"] > 1:
            await asyncio.sleep(0)
        started = time.monotonic()
        await e.stop()
        assert time.monotonic() - started < 6
        assert not child.is_running()
        with pytest.raises(EngineError, match="request lost: it was stopped"):
            await second
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())


def test_what_the_child_raises_at_its_start_is_raised_here_and_no_process_is_left() -> None:
    for builder, kind, reason in (
        (RefusingBuilder(), PluginError, "'nothing' is no engine"),
        (VanishingBuilder(), EngineError, "ended with exit code 7"),
    ):
        e = ProcessEngine(builder, stored())
        with pytest.raises(kind, match=reason):
            asyncio.run(e.start())
        assert e.pid is None


PARENT = """
import asyncio, os, signal
from relax_core.media import MediaStore
from relax_core.testing.engines import request
from relax_core.testing.processes import ENDLESS, CountingBuilder
from relax_core.remote.process import ProcessEngine

async def main():
    e = ProcessEngine(CountingBuilder(), MediaStore({}, 1))
    await e.start()
    task = asyncio.create_task(e.generate(request("busy", [3], ENDLESS)))
    while not (await e.health())["running"]:
        pass
    print(e.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_busy_child_whose_parent_is_killed_ends_too(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while lives(pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


# --- without a process ------------------------------------------------------------------------------------------------


def test_media_are_sent_once_and_dropped_least_recently_used_first() -> None:
    sent = SentMedia(stored(), max_bytes=24)  # two features of 12 bytes
    assert [m[:2] for m in sent.use(["red", "green", "red"])] == [("put", "red"), ("put", "green")]
    assert sent.done(["red", "green", "red"]) == []
    assert sent.use(["red"]) == []
    assert [m[:2] for m in sent.use(["blue"])] == [("put", "blue")]
    assert sent.done(["red"]) == [("drop", "green")]  # red was used since
    assert sent.done(["blue"]) == []
    assert [m[0] for m in sent.use(["green"])] == ["put"]


def test_media_of_running_requests_stay_beyond_the_bound() -> None:
    sent = SentMedia(stored(), max_bytes=0)
    sent.use(["red"])
    sent.use(["red", "blue"])
    assert sent.done(["red"]) == []
    assert sent.done(["red", "blue"]) == [("drop", "red"), ("drop", "blue")]
    with pytest.raises(DataError):
        sent.use(["red", "unknown"])
    assert sent.use(["red"]) != []  # the refused request left no trace


def test_errors_keep_their_kind_across_the_wire() -> None:
    assert isinstance(restore("WeightsError", "x"), WeightsError)
    other = restore("KeyError", "'x'")
    assert type(other) is EngineError
    assert str(other) == "engine process: KeyError: 'x'"
