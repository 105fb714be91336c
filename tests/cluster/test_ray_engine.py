"""Engines in Ray actors: the bits of one in this process, few calls, guests, and every kind of end."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from relax_core.errors import ConfigError, DataError, EngineError, PluginError
from relax_core.interfaces import Completion, Engine, Request
from relax_core.media import MediaStore
from relax_core.remote.host import Host
from relax_core.remote.wire import framed, receive
from relax_core.router import Router
from relax_core.testing import check_engine
from relax_core.testing.engines import changed_weights, request
from relax_core.testing.processes import (
    ENDLESS,
    CountingBuilder,
    CountingEngine,
    OddBuilder,
    RefusingBuilder,
    check_what_cannot_travel,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.two_turns import IMAGE, filled, play, plays
from relax_core.torch.engine import TorchEngine
from relax_core.transports import SharedTransport
from relax_core.types import Encoded, MediaRef, Version
from relax_core.weights import Manifest, WeightUpdate
from relax_plugin_ray.config import cores_of
from relax_plugin_ray.door import Address, enter, new_name
from relax_plugin_ray.engine import RayEngine, RunBuilder, _Client, engine_actor
from relax_plugin_ray.media import SharedMedia
from relax_plugin_ray.worker import keep_to

pytestmark = [pytest.mark.timeout(110), pytest.mark.usefixtures("cluster")]

NOTHING = WeightUpdate(Manifest(Version(0, 1), ()), None)  # type: ignore[arg-type]  # never read
CPU = 0.1


def tiny_builder(deterministic: bool) -> Callable[[], tuple[Engine, MediaStore]]:
    """As a function inside of a function it travels by value: an actor cannot import this module."""

    def build() -> tuple[Engine, MediaStore]:
        from relax_core.setup import EngineSetup
        from relax_core.testing.tiny import tiny_adapter
        from relax_core.torch.config import EngineConfig
        from relax_core.torch.engine import TorchEngine
        from relax_plugin_ray.media import SharedMedia

        media = SharedMedia({}, max_bytes=1 << 20)
        adapter = tiny_adapter(media=media, images=True)
        return TorchEngine(EngineConfig(device="cpu", max_rows=4), EngineSetup(adapter, 3, deterministic)), media

    return build


def colours() -> SharedMedia:
    return filled(SharedMedia({}, max_bytes=1 << 20))


def owner(builder: Any, media: MediaStore | None = None) -> RayEngine:
    return RayEngine.spawn(lambda: engine_actor(builder, num_cpus=CPU), media or colours())


def served(test: Callable[[RayEngine], Awaitable[None]], builder: Any, media: MediaStore | None = None) -> None:
    async def main() -> None:
        engine = owner(builder, media)
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 100))


def weights() -> list[Any]:
    import torch

    return changed_weights(tiny_adapter(images=True).load("cpu", torch.float32), 0, 0.1)


@pytest.mark.slow
def test_it_keeps_the_promises_of_every_engine() -> None:
    """A restart takes a new process of an actor: that is what ``start`` does after ``kill`` and ``stop``."""
    adapter = tiny_adapter(media=SharedMedia({}, max_bytes=1 << 20), images=True)
    check_engine(lambda setup: owner(tiny_builder(False), adapter.media), adapter=adapter, kill=kill, long=400)


def about(*keys: str, new: int = 8) -> Request:
    media = tuple(MediaRef("image", key, i, 1) for i, key in enumerate(keys))
    return request("about", Encoded([3] * (len(keys) + 2), media), new)


async def kill(engine: RayEngine) -> None:
    assert engine.handle is not None
    os.kill(await engine.handle.pid.remote(), signal.SIGKILL)


async def gauge(engine: Engine, name: str, value: float) -> None:
    """Until a gauge has this value."""
    deadline = time.monotonic() + 20
    while (found := (await engine.health())[name]) != value:
        assert time.monotonic() < deadline, f"{name} is {found}"
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_the_same_bits_as_in_this_process_before_and_after_new_weights() -> None:
    async def both(e: Engine) -> list[Any]:
        transport = SharedTransport(SharedTransport.Config())
        try:
            before = await plays(e)
            await e.load_weights(transport.publish(Version(0, 1), weights()))
            return [before, await plays(e)]
        finally:
            transport.close()

    async def here() -> list[Any]:
        e, media = tiny_builder(deterministic=True)()
        assert isinstance(media, SharedMedia)
        filled(media)
        await e.start()
        try:
            return await both(e)
        finally:
            await e.stop()

    async def test(e: RayEngine) -> None:
        assert e.exact_versions
        found = await both(e)
        assert found == expected
        assert {v for play in found[1] for c in play for v in c.versions} == {Version(0, 1)}
        with pytest.raises(EngineError, match="its prompt is empty"):
            await e.generate(request("bad", []))
        with pytest.raises(DataError, match="unknown"):
            await e.generate(request("lost", Encoded([IMAGE], (MediaRef("image", "unknown", 0, 1),))))

    expected = asyncio.run(here())
    served(test, tiny_builder(deterministic=True))


@pytest.mark.parametrize("shared", [True, False])
def test_media_reach_the_actor_shared_or_not_whatever_was_dropped_there_before(shared: bool) -> None:
    media = colours() if shared else filled(MediaStore({}, max_bytes=1 << 20))

    async def main() -> None:
        e = RayEngine.spawn(lambda: engine_actor(CountingBuilder(), num_cpus=CPU), media, media_bytes=12)
        await e.start()
        try:
            for _ in range(2):
                for keys, sums in ((("red",), [1]), (("green", "blue"), [2, 4]), (("blue", "red"), [4, 1])):
                    assert (await e.generate(about(*keys))).ids[1:] == sums
        finally:
            await e.stop()

    asyncio.run(main())


def test_what_is_said_at_once_travels_in_one_call_and_comes_back_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(e: RayEngine) -> None:
        answers: list[int] = []
        deliver = e._deliver

        def counted(messages: Any) -> None:
            answers.append(len(messages))
            deliver(messages)

        monkeypatch.setattr(e, "_deliver", counted)
        calls = e._number
        done = await asyncio.gather(*(e.generate(about("red")) for _ in range(64)))
        assert [c.ids for c in done] == [[3, 1]] * 64
        assert sum(answers) == 64
        assert len(answers) <= 8
        assert e._number - calls <= 2

    served(test, CountingBuilder())


def test_a_stranger_at_the_door_is_not_listened_to(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "unpickled"),))

    async def greeted(address: Address, name: str) -> bytes:
        """What the actor says to one who comes with this name, until it closes the connection."""
        reader, writer = await enter(address, name)
        framed(writer)([(1, [("settled", Bomb())])])
        try:
            return await reader.read()
        except OSError:  # it may close before it has read all
            return b""
        finally:
            writer.close()

    async def test(e: RayEngine) -> None:
        assert e.handle is not None
        name = new_name()
        _, address = await e.handle.open.remote(name, True)
        assert await greeted(address, new_name()) == b""
        assert await greeted(address, e._name) == b""  # who has this name is there already
        assert not (tmp_path / "unpickled").exists()
        assert (await e.generate(about("red"))).ids == [3, 1]
        reader, writer = await enter(address, name)
        framed(writer)([(1, [("settled", 5)])])
        assert await receive(reader) == [(5, None, None)]
        writer.close()

    served(test, CountingBuilder())


def test_an_engine_is_kept_to_its_cores() -> None:
    def build() -> tuple[Engine, MediaStore]:
        from relax_core.testing.processes import CountingBuilder
        from relax_plugin_ray.worker import keep_to

        keep_to((0,), "engine-0")
        return CountingBuilder()()

    async def test(e: RayEngine) -> None:
        assert e.handle is not None
        pid = await e.handle.pid.remote()
        assert {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir(f"/proc/{pid}/task")} == {frozenset({0})}

    served(test, build)
    with pytest.raises(ConfigError, match="cores of engine-1: found 4096; its machine has 0 to"):
        keep_to((0, 4096), "engine-1")
    keep_to((), "engine-1")
    assert [cores_of(((0, 1), (2,)), i) for i in range(3)] == [(0, 1), (2,), (0, 1)] and cores_of((), 1) == ()


def test_what_cannot_travel_or_be_read_is_an_error_and_nobody_waits_for_it() -> None:
    served(check_what_cannot_travel, OddBuilder())


def test_calls_that_overtake_each_other_are_put_in_order() -> None:
    said: list[str] = []

    class Listening(CountingEngine):
        def enter(self, pool: str) -> None:
            said.append(pool)

    client = _Client(Host(Listening(colours()), colours()), guest=False)
    for number, pool in ((3, "c"), (1, "a"), (2, "b"), (4, "d")):
        client.receive(number, [("enter", pool), ("enter", pool)])
    assert said == list("aabbccdd")


def test_what_the_builder_raises_is_raised_here() -> None:
    async def main() -> None:
        e = owner(RefusingBuilder())
        with pytest.raises(PluginError, match="'nothing' is no engine"):
            await e.start()
        with pytest.raises(EngineError, match="start it again"):
            await e.health()

    asyncio.run(main())


def test_a_killed_actor_fails_what_waits_at_once_and_a_new_start_serves_again() -> None:
    async def test(e: RayEngine) -> None:
        assert (await e.generate(about("red", "blue"))).ids == [4, 1, 4]
        for _ in range(3):
            e.enter("train")
        e.leave("train")
        tasks = [asyncio.create_task(e.generate(about("red", new=ENDLESS))) for _ in range(3)]
        await gauge(e, "running", 3)
        assert (await e.health())["entered"] == 2
        tasks.append(asyncio.create_task(e.generate(about("red", new=ENDLESS))))
        await asyncio.sleep(0)
        tasks.pop().cancel()
        await gauge(e, "running", 3)
        await kill(e)
        killed = time.monotonic()
        for task in tasks:
            with pytest.raises(EngineError, match="engine actor: request lost: ActorDiedError"):
                await task
        assert time.monotonic() - killed < 1.0
        with pytest.raises(EngineError, match="start it again"):
            await e.generate(about("red"))
        await e.start()
        assert (await e.generate(about("red", "blue"))).ids == [4, 1, 4]
        assert (await e.health())["entered"] == 2

    served(test, CountingBuilder())


@pytest.mark.slow
def test_of_two_replicas_one_is_killed_and_all_plays_end_with_the_same_ids() -> None:
    def requests() -> list[Request]:
        media = (MediaRef("image", "green", 0, 1),)
        return [
            request(f"p{i}", Encoded([IMAGE, 3, i], media) if i % 2 else [3, 4, i], 30 + 3 * i, order=(i,))
            for i in range(8)
        ]

    async def played(router: Router, killed: RayEngine | None) -> list[Completion]:
        before = (await router.health())["drawn_tokens"]
        tasks = [asyncio.create_task(router.generate(r)) for r in requests()]
        if killed is not None:
            while (await router.health())["drawn_tokens"] < before + 60:
                await asyncio.sleep(0.002)
            await kill(killed)
        return await asyncio.gather(*tasks)

    async def main() -> None:
        media, notes = colours(), list[str]()
        engines = [owner(tiny_builder(deterministic=False), media) for _ in range(2)]
        router = Router(engines, notes.append)
        transport = SharedTransport(SharedTransport.Config())
        await router.start()
        try:
            await router.load_weights(transport.publish(Version(0, 1), weights()))
            undisturbed = await played(router, None)
            disturbed = await played(router, engines[0])
            assert [c.ids for c in disturbed] == [c.ids for c in undisturbed]
            assert {v for c in disturbed for v in c.versions} == {Version(0, 1)}
            await gauge(router, "serving", 2)
            gauges = await router.health()
            assert (gauges["restarts"], gauges["replicas/0/version"]) == (1, 1)
            assert gauges["resent"] >= 1
            assert "ActorDiedError" in notes[0]
        finally:
            await router.stop()
            transport.close()

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.slow
def test_guests_wait_for_weights_leave_no_trace_and_find_the_actor_made_anew() -> None:
    async def test(e: RayEngine) -> None:
        guest = RayEngine.connect(e.handle, colours())
        await guest.start()
        early = asyncio.create_task(guest.generate(about("red", "green")))
        await guest.settled()
        assert not early.done()
        await e.load_weights(NOTHING)
        assert (await early).ids == [4, 1, 2]

        e.enter("train")
        guest.enter("train")
        await guest.settled()
        assert (await e.health())["entered"] == 2
        endless = asyncio.create_task(guest.generate(about("red", new=ENDLESS)))
        await gauge(e, "running", 1)
        await guest.stop()
        with pytest.raises(EngineError, match="it was disconnected"):
            await endless
        await gauge(e, "running", 0)
        assert (await e.health())["entered"] == 1

        await guest.start()
        assert (await e.health())["entered"] == 2
        await kill(e)
        with pytest.raises(EngineError, match="ActorDiedError"):
            await guest.generate(about("red", new=ENDLESS))
        again = asyncio.create_task(guest.start())  # as a router does; the old actor will not answer
        await asyncio.sleep(0.2)
        await e.start()
        await guest.reconnect(e.handle)
        await again
        late = asyncio.create_task(guest.generate(about("red")))
        await guest.settled()
        assert (await e.health())["entered"] == 2
        assert not late.done()
        await e.load_weights(NOTHING)
        assert (await late).ids == [3, 1]
        await guest.stop()

    served(test, CountingBuilder())


@pytest.mark.slow
def test_routers_of_owner_and_guest_bring_a_named_actor_back_though_only_the_guest_asks() -> None:
    async def main() -> None:
        name = f"engine-{os.urandom(4).hex()}"
        e = RayEngine.spawn(lambda: engine_actor(CountingBuilder(), num_cpus=CPU, name=name), colours())
        router = Router([e], lambda note: None)
        guests = Router([RayEngine.connect(lambda: ray.get_actor(name), colours())], lambda note: None)
        await asyncio.gather(guests.start(), router.start())
        try:
            await router.load_weights(NOTHING)
            assert (await guests.generate(about("red", "green"))).ids == [4, 1, 2]
            endless = asyncio.create_task(guests.generate(about("red", new=ENDLESS)))
            await gauge(guests, "running", 1)
            await kill(e)
            await gauge(guests, "resent", 1)
            assert (await guests.generate(about("red", "green"))).ids == [4, 1, 2]
            await gauge(guests, "running", 1)  # what was lost is asked for again
            assert (await router.health())["restarts"] == 1
            endless.cancel()
        finally:
            await guests.stop()
            await router.stop()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_the_engine_of_a_run_file_is_built_with_a_store_that_knows_what_is_shared() -> None:
    from relax_core.config.resolve import load, resolved

    run_file = Path(__file__).parents[2] / "configs" / "omni-tiny.yaml"
    builder = RunBuilder(resolved(*load(run_file)), "engine", deterministic=True)
    engine, media = pickle.loads(pickle.dumps(builder))()
    assert isinstance(media, SharedMedia)
    assert isinstance(engine, TorchEngine)
    assert engine.setup.deterministic
    assert engine.setup.adapter.media is media


@pytest.mark.slow
def test_a_killed_guest_process_leaves_no_party_and_no_request() -> None:
    class Worker:
        async def work(self, handles: list[Any]) -> int:
            import asyncio
            import os

            from relax_core.media import MediaStore
            from relax_core.testing.engines import request
            from relax_core.testing.processes import ENDLESS
            from relax_plugin_ray.engine import RayEngine

            self.engine = RayEngine.connect(handles[0], MediaStore({}, max_bytes=0))
            await self.engine.start()
            self.engine.enter("train")
            self.task = asyncio.create_task(self.engine.generate(request("busy", [3], ENDLESS)))
            await self.engine.settled()
            return os.getpid()

    async def test(e: RayEngine) -> None:
        await e.load_weights(NOTHING)
        worker: Any = ray.remote(Worker).options(num_cpus=CPU).remote()
        pid = await worker.work.remote([e.handle])
        assert (await e.health()) == {"running": 1.0, "entered": 1.0}
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        await gauge(e, "running", 0)
        assert (await e.health())["entered"] == 0
        assert time.monotonic() - killed < 5

    served(test, CountingBuilder())


@pytest.mark.slow
def test_plays_of_two_clients_have_the_bits_of_one() -> None:
    async def test(e: RayEngine) -> None:
        transport = SharedTransport(SharedTransport.Config())
        guest = RayEngine.connect(e.handle, colours())
        await guest.start()
        try:
            await e.load_weights(transport.publish(Version(0, 1), weights()))
            alone = await plays(e)
            for _ in range(7):
                e.enter("train")
            await e.settled()
            played = await asyncio.gather(*(play(guest if m % 3 else e, m, e) for m in range(7)))
            assert played == alone
        finally:
            await guest.stop()
            transport.close()

    served(test, tiny_builder(deterministic=True))
