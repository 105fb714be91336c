"""The router, over engines that are made for it, in virtual time."""

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from relax_core.errors import EngineError, WeightsError
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.loads import Homes, Loads, cost
from relax_core.router import Router
from relax_core.testing.engines import request
from relax_core.types import Stop, Version
from relax_core.weights import Manifest, WeightUpdate

pytestmark = pytest.mark.timeout(30)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer whenever nothing is ready."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self.now = max(self.now, loop._scheduled[0]._when)
        loop.__class__.__mro__[1]._run_once(self)


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(cast(Any, main()))
    finally:
        loop.close()


def weights(number: int) -> WeightUpdate:
    return WeightUpdate(Manifest(Version(0, number), ()), cast(Any, None))


@dataclass
class Fake(Engine):
    """Draws ids from the key alone, a token a second. ``kill`` ends it; ``refuses`` makes that many starts fail."""

    name: str
    start_s: float = 3.0
    alive: bool = False
    refuses: int = 0
    version: int = 0
    parties: int = 0
    starts: int = 0
    lost: set[int] = field(default_factory=set)
    """Versions whose publisher is gone."""
    broken: bool = False
    """It refuses any weights."""
    shares: bool = True
    tells: bool = False
    """Whether it says when it died."""
    seen: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    running: set[asyncio.Future[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(None)
        self.killed = asyncio.Event()

    def kill(self) -> None:
        self.alive = False
        self.killed.set()
        for future in self.running:
            future.cancel()

    async def start(self) -> None:
        self.starts += 1
        self.version = 0
        if self.starts > 1:
            await asyncio.sleep(self.start_s)
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("no memory")
        self.alive = True
        self.killed.clear()

    async def generate(self, request: Request) -> Completion:
        await self.health()
        self.seen.append(request.id)
        if not request.prompt.ids:
            raise EngineError(f"engine: {request.id}: its prompt is empty")
        future = asyncio.ensure_future(asyncio.sleep(request.sampling.max_new_tokens))
        self.running.add(future)
        try:
            await future
        except asyncio.CancelledError:
            if self.alive:
                raise
            raise EngineError("engine: request lost: killed") from None
        finally:
            self.running.discard(future)
        ids = [hash((request.key, i)) % 97 for i in range(request.sampling.max_new_tokens)]
        return Completion(ids, [0.0] * len(ids), [Version(0, self.version)] * len(ids), Stop.LENGTH)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        await self.health()
        number = update.manifest.version.number
        self.says.append(f"weights {number}")
        if self.broken or number in self.lost:
            raise WeightsError("weights: the publisher's memory is gone")
        await asyncio.sleep(1)
        await self.health()
        self.version = number % 100

    async def died(self) -> str:
        if not self.tells:
            return await super().died()
        await self.killed.wait()
        return "killed, and said so"

    async def share_weights(self, host: str | None = None) -> WeightUpdate:
        if not self.shares:
            return await super().share_weights()
        return weights(100 + self.version)

    def enter(self, pool: str) -> None:
        self.parties += 1

    def leave(self, pool: str) -> None:
        self.parties -= 1

    async def stop(self) -> None:
        self.kill()

    async def pause(self) -> None:
        await self.health()
        self.says.append("pause")

    async def sleep(self) -> None:
        await self.health()
        self.says.append("sleep")

    async def health(self) -> Mapping[str, float]:
        if not self.alive:
            raise EngineError(f"engine {self.name}: killed")
        return {"running": float(len(self.running)), "waiting": 0.0, "version": float(self.version)}


async def started(count: int, notes: list[str] | None = None, **settings: Any) -> tuple[Router, list[Fake]]:
    fakes = [Fake("abcdefgh"[i]) for i in range(count)]
    router = Router(fakes, (notes if notes is not None else []).append, **settings)
    await router.start()
    return router, fakes


def ask(router: Router, *requests: Request) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(router.generate(r)) for r in requests]


def play(name: str, new: int = 5, turn: int = 0, prompt: int = 4) -> Request:
    r = request(name, [1] * prompt, new)
    return replace(r, key=r.key._replace(turn=turn), id=f"{name}.{turn}")


def test_the_replica_with_the_least_outstanding_tokens_serves() -> None:
    async def main() -> None:
        router, (a, b, c) = await started(3)
        tasks = ask(router, play("long", 100), play("middle", 50), play("short", 10), play("next", 10))
        await asyncio.sleep(1)
        assert (a.seen, b.seen, c.seen) == (["long.0"], ["middle.0"], ["short.0", "next.0"])
        gauges = await router.health()
        assert [gauges[f"replicas/{i}/outstanding_tokens"] for i in range(3)] == [104, 54, 28]
        assert (gauges["running"], gauges["outstanding_tokens"], gauges["serving"]) == (4, 186, 3)
        await asyncio.sleep(20)  # the short ones are done
        tasks += ask(router, replace(play("continued", 60), drawn=40), play("last", 5))
        await asyncio.sleep(1)
        assert c.seen[2:] == ["continued.0", "last.0"]  # 4 + 60 - 40 tokens, and then still the least
        await asyncio.gather(*tasks)
        assert (await router.health())["outstanding_tokens"] == 0
        await router.stop()

    virtually(main)


def test_a_conversation_stays_with_its_replica_until_that_is_started_anew() -> None:
    async def main() -> None:
        router, fakes = await started(4)
        await asyncio.gather(*ask(router, *(play(f"p{i}", 5 + i) for i in range(4))))
        for turn in (1, 2):  # whatever is idle meanwhile, and in whatever order they come
            await asyncio.gather(*ask(router, *(play(f"p{i}", 5 + i, turn) for i in reversed(range(4)))))
        assert [fake.seen for fake in fakes] == [[f"p{i}.{turn}" for turn in range(3)] for i in range(4)]
        fakes[2].kill()
        assert await router.generate(play("p2", 3, 3))
        assert fakes[0].seen[3:] == ["p2.3"]
        await asyncio.sleep(100)
        await router.generate(play("p2", 3, 4))
        assert fakes[0].seen[4:] == ["p2.4"]
        await router.stop()

    virtually(main)


def test_requests_of_a_killed_replica_end_on_others_with_the_same_ids_and_it_comes_back_with_weights() -> None:
    async def undisturbed() -> list[list[int]]:
        router, _ = await started(2)
        done = await asyncio.gather(*ask(router, *(play(f"p{i}", 10 + i) for i in range(6))))
        await router.stop()
        return [c.ids for c in done]

    async def main() -> None:
        notes: list[str] = []
        router, (a, _) = await started(2, notes)
        await router.load_weights(weights(7))
        tasks = ask(router, *(play(f"p{i}", 10 + i) for i in range(6)))
        await asyncio.sleep(2)
        a.kill()
        await router.pause()
        done = await asyncio.gather(*tasks)
        assert [c.ids for c in done] == expected
        assert {c.versions[0].number for c in done} == {7}
        gauges = await router.health()
        assert (gauges["serving"], gauges["restarts"], gauges["resent"]) == (2, 1, 3)
        assert (a.starts, a.version) == (2, 7)
        assert a.says == ["weights 7", "weights 7", "pause"]
        assert notes[0] == "engine 0: engine a: killed; it is started again, its 3 requests go elsewhere"
        assert notes[1:] == ["engine 0: serves again after 4.0 s"]
        await router.stop()

    expected: list[list[int]] = []

    async def first() -> None:
        expected.extend(await undisturbed())

    virtually(first)
    virtually(main)


def test_only_an_engine_alone_hears_who_is_at_work() -> None:
    """It may decode only when all of them wait; several engines that did so would wait for ever."""

    async def main(replicas: int) -> list[int]:
        router, fakes = await started(replicas)
        for _ in range(3):
            router.enter("train")
        router.leave("train")
        await router.stop()
        return [fake.parties for fake in fakes]

    found: list[list[int]] = []

    async def both() -> None:
        found.extend([await main(1), await main(2)])

    virtually(both)
    assert found == [[2], [0, 0]]


def test_a_request_refused_for_its_own_sake_is_not_sent_again() -> None:
    async def main() -> None:
        router, fakes = await started(2)
        with pytest.raises(EngineError, match="its prompt is empty"):
            await router.generate(play("empty", prompt=0))
        assert sum(len(fake.seen) for fake in fakes) == 1
        assert (await router.health())["restarts"] == 0
        await router.stop()

    virtually(main)


def test_the_only_replica_is_waited_for() -> None:
    async def main() -> None:
        router, (a,) = await started(1)
        await router.load_weights(weights(3))
        tasks = ask(router, *(play(f"p{i}", 10) for i in range(3)))
        await asyncio.sleep(1)
        a.kill()
        await asyncio.sleep(0.1)
        assert (await router.health())["waiting"] == 3
        later = ask(router, play("later"))
        loading = asyncio.create_task(router.load_weights(weights(4)))  # while nobody serves
        done = await asyncio.gather(*tasks, *later)
        assert {v.number for c in done for v in c.versions} == {4}
        await loading
        assert a.says == ["weights 3", "weights 4"] or a.says == ["weights 3", "weights 4", "weights 4"]
        assert asyncio.get_running_loop().time() < 20
        await router.stop()

    virtually(main)


def test_an_idle_replica_that_dies_is_started_again_without_a_request() -> None:
    async def main() -> None:
        notes: list[str] = []
        router, (a, b) = await started(2, notes)
        a.tells = b.tells = True
        for fake in (a, b, a):
            await router.generate(play("p"))  # nothing of it is at the dying one
            await router.stop()
            await router.start()  # they tell from now on
            notes.clear()
            fake.kill()
            await asyncio.sleep(10)
            assert notes[0].startswith("engine") and "killed, and said so; it is started again, its 0 req" in notes[0]
            assert notes[1].endswith("serves again after 3.0 s")
        assert (await router.health())["serving"] == 2
        await router.stop()

    virtually(main)


def test_delays_grow_and_after_too_many_restarts_a_replica_stays_out() -> None:
    async def main() -> None:
        notes: list[str] = []
        router, (a, b) = await started(2, notes, max_restarts=3, delay_s=1.0)
        a.refuses = 99
        a.kill()
        assert await router.generate(play("p"))
        await asyncio.sleep(60)
        assert a.starts == 4
        assert notes[-1] == "engine 0: stays out: 3 restarts within 600 s"
        assert [note for note in notes if "no memory" in note] == [
            "engine 0: its restart failed: RuntimeError: no memory"
        ] * 3
        assert (await router.health())["serving"] == 1
        b.refuses = 99
        b.kill()
        waiting = ask(router, play("q"), play("r"))
        loading = asyncio.create_task(router.load_weights(weights(1)))
        with pytest.raises(
            EngineError, match=r"none of 2 is left.*engine 0: RuntimeError: no memory; engine 1: RuntimeError: no mem"
        ):
            await waiting[0]
        for call in (waiting[1], loading, router.health(), router.generate(play("s"))):
            with pytest.raises(EngineError, match="none of 2 is left"):
                await call
        await router.stop()

    virtually(main)


def test_restarts_of_long_ago_do_not_count() -> None:
    async def main() -> None:
        router, (a,) = await started(1, max_restarts=1, within_s=50.0)
        for _ in range(4):
            a.kill()
            assert await router.generate(play("p"))
            await asyncio.sleep(60)
        assert a.starts == 5
        await router.stop()

    virtually(main)


def test_weights_whose_publisher_is_gone_come_from_a_living_replica() -> None:
    async def main() -> None:
        router, (a, b, _) = await started(3)
        await router.load_weights(weights(5))
        b.shares = False
        a.lost = {5}
        a.kill()
        await router.generate(play("p"))
        await asyncio.sleep(30)
        assert a.says[1:] == ["weights 5", "weights 105"]
        assert (a.version, (await router.health())["serving"]) == (5, 3)
        await router.stop()

    virtually(main)


def test_weights_go_to_all_at_once_a_dying_replica_is_left_out_and_a_refusal_is_an_error() -> None:
    async def main() -> None:
        router, fakes = await started(3)
        loop = asyncio.get_running_loop()
        await router.load_weights(weights(1))
        assert loop.time() == 1.0
        loading = asyncio.create_task(router.load_weights(weights(2)))
        await asyncio.sleep(0.5)
        fakes[1].kill()
        await loading
        assert [fakes[0].version, fakes[2].version] == [2, 2]
        await asyncio.sleep(30)
        assert fakes[1].version == 2
        fakes[2].broken = True
        with pytest.raises(WeightsError, match="engine 2: weights: the publisher's memory is gone"):
            await router.load_weights(weights(3))
        await router.stop()

    virtually(main)


def test_weights_published_during_a_restart_are_the_ones_that_are_served() -> None:
    async def main() -> None:
        router, (a, _) = await started(2)
        await router.load_weights(weights(1))
        a.kill()
        await router.generate(play("p"))
        while a.says.count("weights 1") < 2:  # the restarted one is just loading the old ones
            await asyncio.sleep(0.1)
        await router.load_weights(weights(2))
        await router.sleep()
        await asyncio.sleep(10)
        assert (a.version, a.says[-1]) == (2, "sleep")
        assert (await router.health())["version"] == 2
        await router.stop()

    virtually(main)


def test_a_replica_that_cannot_start_at_first_is_an_error_and_the_others_are_stopped() -> None:
    async def main() -> None:
        fakes = [Fake("a"), Fake("b", refuses=1)]
        router = Router(fakes)
        with pytest.raises(RuntimeError, match="no memory"):
            await router.start()
        assert not fakes[0].alive
        with pytest.raises(EngineError, match="none of 2 is left"):
            await router.generate(play("p"))

    virtually(main)


def test_stop_ends_requests_and_restarts() -> None:
    async def main() -> None:
        router, (a, b) = await started(2)
        a.start_s = 1e6
        a.kill()
        tasks = ask(router, play("p", 50), play("q", 50))
        await asyncio.sleep(1)
        await router.stop()
        for task in tasks:
            with pytest.raises(EngineError):
                await task
        assert not a.alive and not b.alive

    virtually(main)


def test_a_cancelled_request_is_not_outstanding() -> None:
    async def main() -> None:
        router, _ = await started(1)
        (task,) = ask(router, play("p", 50))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.sleep(1)
        gauges = await router.health()
        assert (gauges["outstanding_tokens"], gauges["running"]) == (0, 0)
        await router.stop()

    virtually(main)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_least_is_what_a_scan_finds_through_any_changes() -> None:
    import random

    rng = random.Random(0)
    loads, serving = Loads(7), set(range(5))
    for i in serving:
        loads.join(i)
    running: list[tuple[int, int]] = []
    for _ in range(5000):
        event = rng.random()
        if event < 0.02:
            i = rng.randrange(7)
            if i in serving:
                loads.leave(i)
                serving.discard(i)
            else:
                loads.join(i)
                serving.add(i)
        elif event < 0.5 and running:
            loads.end(*running.pop(rng.randrange(len(running))))
        else:
            found = loads.least()
            assert found == min(serving, key=lambda i: (loads.tokens[i], i), default=None)
            if found is not None:
                running.append((found, rng.randrange(1, 100)))
                loads.begin(*running[-1])
    assert len(loads._heap) <= 8 * 7 + 64


def test_choosing_takes_as_long_for_512_replicas_as_for_8() -> None:
    def seconds(count: int) -> float:
        loads, homes = Loads(count), Homes(1 << 16)
        for i in range(count):
            loads.join(i)
        best = float("inf")
        for _ in range(5):
            began, running = time.perf_counter(), []
            for k in range(4000):
                index = loads.least()
                assert index is not None
                loads.begin(index, k % 97)
                homes.set(k, index, 0)
                running.append((index, k % 97))
                if k % 2:
                    loads.end(*running.pop(0))
            for done in running:
                loads.end(*done)
            best = min(best, time.perf_counter() - began)
        return best / 4000

    few, many = seconds(8), seconds(512)
    assert many < 3 * few, f"{few * 1e6:.2f} and {many * 1e6:.2f} microseconds"
    assert many < 1e-4


def test_homes_are_bounded_by_use() -> None:
    homes = Homes(2)
    for name in ("a", "b"):
        homes.set(name, 0, 0)
    homes.set("a", 1, 0)
    homes.set("c", 2, 0)
    assert (homes.get("a"), homes.get("b"), homes.get("c"), len(homes)) == ((1, 0), None, (2, 0), 2)


def test_what_was_drawn_of_a_turn_is_done() -> None:
    assert cost(play("p", 10, prompt=3)) == 13
    assert cost(replace(play("p", 10, prompt=9), drawn=6)) == 13
    assert cost(replace(play("p", 10, prompt=19), drawn=16)) == 19
