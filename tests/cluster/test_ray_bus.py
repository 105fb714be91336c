"""The bus behind an actor keeps the contract of every bus, across processes that live and die."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle

from relax_core.bus import Bus, BusClosed, BusError, Claim, Holder
from relax_core.errors import FencedError
from relax_core.testing.bus_contract import CHECKS, Check, Kit, run_check, stress
from relax_plugin_ray.boxes import NAMESPACE
from relax_plugin_ray.bus import RayBus
from relax_plugin_ray.bus_actor import BusActor
from tests.cluster.object_store import settled_bytes, stored_bytes

pytestmark = pytest.mark.timeout(240)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
PLAYED = frozenset({"tokens"})
MB = np.dtype(np.float32).itemsize * 250_000


class Resettable(BusActor):
    """One actor for many checks."""

    async def reset(self, max_rows: int, max_bytes: int) -> None:
        BusActor.__init__(self, max_rows, max_bytes)

    async def undoable(self) -> list[str]:
        return list(self._undo)


class Pool:
    """Gives every check a fresh bus, or a few, without new processes."""

    def __init__(self, size: int) -> None:
        self.actors: list[tuple[Any, str]] = []
        for number in range(size):
            name = f"test-bus-{os.getpid()}-{number}"
            options = {"num_cpus": 0, "max_concurrency": 10_000, "name": name, "namespace": NAMESPACE}
            self.actors.append((ray.remote(Resettable).options(**options).remote(1, 1), name))
        self.turns = itertools.cycle(self.actors)
        self.used: list[RayBus] = []

    def make(self, max_rows: int = 1000, max_bytes: int = 10**9) -> RayBus:
        actor, name = next(self.turns)
        ray.get(actor.reset.remote(max_rows, max_bytes), timeout=30)
        bus = RayBus(actor, name)
        self.used = [*self.used[-len(self.actors) + 1 :], bus]
        return bus

    async def settle(self) -> None:
        for _ in range(3):
            for bus in self.used:
                await bus._calls.ask("rows")
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def pool(cluster: str) -> Pool:
    made = Pool(2)  # a check has two at most
    ray.get([actor.undoable.remote() for actor, _ in made.actors], timeout=110)
    return made


@pytest.fixture
def bus(pool: Pool) -> Iterator[RayBus]:
    pool.used.clear()
    made = pool.make()
    yield made
    pool.used.clear()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(pool: Pool, check: Check) -> None:
    pool.used.clear()
    run_check(check, Kit(pool.make, pool.settle))


@pytest.mark.parametrize("seed", range(3))
def test_every_group_contributes_once_under_stress(pool: Pool, seed: int) -> None:
    run_check(stress(seed), Kit(pool.make, pool.settle))


def test_no_method_of_the_bus_is_inherited() -> None:
    names = [name for name in vars(Bus) if not name.startswith("_")]
    assert [name for name in names if name not in vars(RayBus)] == []
    for name in names:
        ours, theirs = vars(RayBus)[name], vars(Bus)[name]
        if callable(theirs):
            assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


# --- processes --------------------------------------------------------------------------------------------------------


class Process:
    """Another process with its own client."""

    def join(self, bus: RayBus, name: str) -> None:
        self.bus, self.holder = bus, bus.register(name)
        self.kept: Any = None
        self.seen: dict[str, list[int]] = {}

    def drop(self) -> None:
        self.kept = None

    def pid(self) -> int:
        return os.getpid()

    async def who(self) -> Holder:
        return self.holder

    async def play(self, group: str, serial: int, rows: dict[str, Any]) -> None:
        await self.bus.open_group(group, serial, f"task of {group}", self.holder)
        await self.bus.put(rows, self.holder, group)
        await self.bus.close_group(group, len(rows), self.holder)

    async def play_large(self, group: str, rows: int) -> None:
        await self.play(group, 0, large(group, rows))

    async def play_many(self, number: int, groups: int, rows: int) -> None:
        for g in range(groups):
            group, first = f"p{number}-g{g}", (number * groups + g) * rows
            made = {f"{group}/{m}/0": {"n": first + m, "tokens": np.full(5, first + m)} for m in range(rows)}
            await self.play(group, number * groups + g, made)

    async def claim(self, stage: str, count: int = 1, needs: frozenset[str] = PLAYED) -> tuple[str, ...]:
        self.kept = await self.bus.claim(stage, needs, count, "group", self.holder)
        groups: tuple[str, ...] = self.kept.groups
        return groups

    async def consume(self, stages: list[str]) -> dict[str, list[int]]:
        """Everything until the bus is closed."""
        seen: dict[str, list[int]] = {stage: [] for stage in stages}

        async def serve(stage: str) -> None:
            needs = frozenset({"n", "tokens"})
            try:
                while True:
                    claim = await self.bus.claim(stage, needs, 300, "row", self.holder)
                    found = [row.columns["n"] for row in claim.rows]
                    assert all(set(row.columns["tokens"].tolist()) == {row.columns["n"]} for row in claim.rows[:5])
                    await self.bus.ack(claim)
                    seen[stage] += found
            except BusClosed:
                pass

        self.seen = seen
        await asyncio.gather(*map(serve, stages))
        return seen

    async def count(self) -> int:
        return sum(map(len, self.seen.values()))

    async def look(self, name: str) -> Any:
        """What ``see`` finds in the rows of the last claim."""
        return [see(row.columns[name]) for row in self.kept.rows]


def see(array: Any) -> tuple[float, bool, int]:
    """Sum, whether it may be written, and the offset from an aligned address."""
    return float(array.sum()), array.flags.writeable, array.ctypes.data % 64


class Crew:
    """Processes that go from test to test: to start one takes longer than most of them."""

    def __init__(self, size: int) -> None:
        self.idle = [self._start() for _ in range(size)]
        self.busy: list[Any] = []

    def take(self, bus: RayBus, name: str) -> Any:
        actor = self.idle.pop() if self.idle else self._start()
        self.busy.append(actor)
        ray.get(actor.join.remote(bus, name), timeout=60)
        return actor

    def kill(self, actor: Any) -> None:
        os.kill(ray.get(actor.pid.remote(), timeout=30), signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.pid.remote(), timeout=30)
        self.busy.remove(actor)

    def rest(self) -> None:
        ray.get([actor.drop.remote() for actor in self.busy], timeout=30)
        self.idle += self.busy
        self.busy = []

    def _start(self) -> Any:
        actor: Any = ray.remote(Process)
        return actor.options(num_cpus=0, max_concurrency=100, max_restarts=0).remote()


@pytest.fixture(scope="module")
def all_processes(cluster: str) -> Crew:
    crew = Crew(16)
    ray.get([actor.pid.remote() for actor in crew.idle], timeout=200)
    return crew


@pytest.fixture
def crew(all_processes: Crew) -> Iterator[Crew]:
    yield all_processes
    all_processes.rest()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "this did not become true in time"
        time.sleep(0.05)


def large(group: str, rows: int = 2) -> dict[str, Any]:
    return {f"{group}/{m}/0": {"tokens": np.full(500_000, m + 1, np.float32), "m": m} for m in range(rows)}


def test_8_producers_and_8_consumers_lose_nothing_and_repeat_nothing(pool: Pool, crew: Crew) -> None:
    bus = pool.make(max_rows=100_000)
    producers = [crew.take(bus, f"rollout-{n}") for n in range(8)]
    consumers = [crew.take(bus, f"consumer-{n}") for n in range(8)]
    seen = [actor.consume.remote(["left", "right"]) for actor in consumers]
    ray.get([actor.play_many.remote(n, 50, 50) for n, actor in enumerate(producers)], timeout=80)
    until(lambda: sum(ray.get([actor.count.remote() for actor in consumers], timeout=30)) >= 2 * 20_000)
    asyncio.run(bus.close())
    found = ray.get(seen, timeout=30)
    for stage in ("left", "right"):
        counts = Counter(n for each in found for n in each[stage])
        assert set(counts) == set(range(20_000)) and set(counts.values()) == {1}
        assert sum(bool(each[stage]) for each in found) > 1  # they shared the work


# --- death ------------------------------------------------------------------------------------------------------------


def test_a_killed_consumer_is_fenced_and_its_claim_offered_again(bus: RayBus, crew: Crew) -> None:
    rollout, dead, living = crew.take(bus, "rollout"), crew.take(bus, "score-0"), crew.take(bus, "score-1")
    ray.get([rollout.play.remote(g, n, large(g)) for n, g in enumerate("ab")], timeout=30)
    assert ray.get(dead.claim.remote("score"), timeout=30) == ("a",)
    holder = ray.get(dead.who.remote(), timeout=30)
    crew.kill(dead)
    assert ray.get(living.claim.remote("score"), timeout=30) == ("b",)
    waiting = living.claim.remote("score")
    assert ray.wait([waiting], timeout=0.5) == ([], [waiting])  # nobody has said yet that it is dead
    bus.declare_dead(holder)
    assert ray.get(waiting, timeout=30) == ("a",)

    async def late() -> None:
        with pytest.raises(FencedError, match="'score-0' is dead"):
            await bus.put({"a/0/0": {"reward": 1.0}}, holder)
        with pytest.raises(FencedError):
            await bus.ack(Claim("score", holder, (), ("a",)))

    asyncio.run(late())


def test_a_slow_holder_keeps_its_claim(bus: RayBus, crew: Crew) -> None:
    rollout, slow, quick = crew.take(bus, "rollout"), crew.take(bus, "score-0"), crew.take(bus, "score-1")
    ray.get(rollout.play.remote("a", 0, large("a")), timeout=30)
    assert ray.get(slow.claim.remote("score"), timeout=30) == ("a",)
    waiting = quick.claim.remote("score")
    assert ray.wait([waiting], timeout=2) == ([], [waiting])


@pytest.mark.parametrize("size", [2_000, 500_000], ids=["carried", "in the object store"])
def test_rows_outlive_the_process_that_put_them(bus: RayBus, crew: Crew, size: int) -> None:
    rollout, reader = crew.take(bus, "rollout"), crew.take(bus, "train")
    rows = {f"a/{m}/0": {"tokens": np.full(size, m + 1, np.float32), "meta": {"m": m}} for m in range(2)}
    ray.get(rollout.play.remote("a", 0, rows), timeout=30)
    crew.kill(rollout)
    del rows
    for stage in ("train", "once more"):
        assert ray.get(reader.claim.remote(stage), timeout=30) == ("a",)
        assert [found[0] for found in ray.get(reader.look.remote("tokens"), timeout=30)] == [size, 2 * size]
    assert [(float(row.columns["tokens"].sum()), row.columns["meta"]) for row in bus.held_rows()] == [
        (size, {"m": 0}),
        (2 * size, {"m": 1}),
    ]


def test_a_bus_that_died_is_an_error_that_says_so_and_a_snapshot_brings_its_rows_back(cluster: str) -> None:
    async def first() -> bytes:
        bus = RayBus.start(100, 10**9)
        holder = bus.register("rollout")
        await bus.open_group("a", 0, {"a": "task"}, holder)
        await bus.put({**large("a"), "a/2/0": {"tokens": np.arange(3), "m": None}}, holder, "a")
        await bus.close_group("a", 3, holder)
        saved = pickle.dumps(bus.snapshot())
        waiting = asyncio.ensure_future(bus.claim("never", frozenset({"never"}), 1, "row", holder))
        await asyncio.sleep(0.1)
        ray.kill(bus._actor)
        with pytest.raises(BusError, match=r"its actor is gone.*last checkpoint"):
            await waiting
        with pytest.raises(BusError, match="its actor is gone"):
            bus.register("rollout")
        return saved

    saved = asyncio.run(first())
    again = RayBus.start(100, 10**9)
    again.restore(pickle.loads(saved))
    rows = again.held_rows()
    assert [row.columns["m"] for row in rows] == [0, 1, None]
    assert [row.columns["tokens"].sum() for row in rows] == [500_000, 1_000_000, 3]
    assert again.snapshot().groups[0].task == {"a": "task"}
    with pytest.raises(BusError, match="restore found 1 groups"):
        again.restore(pickle.loads(saved))


# --- room -------------------------------------------------------------------------------------------------------------


def test_producers_in_other_processes_wait_for_room(pool: Pool, crew: Crew) -> None:
    bus = pool.make(max_rows=20)
    producers = [crew.take(bus, f"rollout-{n}") for n in range(2)]
    done = [actor.play_many.remote(n, 10, 5) for n, actor in enumerate(producers)]
    until(lambda: bus.full)

    async def consume() -> list[int]:
        holder, seen = bus.register("train"), []
        for step in range(20):
            claim = await bus.claim("train", frozenset({"n", "tokens"}), 1, "group", holder)
            seen += [row.columns["n"] for row in claim.rows]
            assert bus.rows <= 20
            await bus.ack(claim, retain=step)
            bus.release(step)
        return seen

    assert sorted(asyncio.run(consume())) == list(range(100))
    ray.get(done, timeout=30)
    assert (bus.rows, bus.bytes, bus.overfull) == (0, 0, 0)


def test_what_was_granted_to_a_cancelled_call_is_given_back(bus: RayBus) -> None:
    """The cancellation reaches the actor after its answer has left."""

    async def check() -> None:
        holder = bus.register("x")
        await bus.open_group("a", 0, None, holder)
        await bus.put(large("a"), holder, "a")
        ticket = await last_ticket()
        await bus.put({"a/2/0": {"tokens": np.zeros(3)}}, holder, "a")
        assert bus.rows == 3
        await bus._actor.cancel.remote(await last_ticket())
        assert [row.id for row in bus.held_rows()] == ["a/0/0", "a/1/0"]
        await bus.close_group("a", 2, holder)
        await bus._actor.cancel.remote(ticket)  # the group is closed: others may have seen the rows
        assert bus.rows == 2
        for by in ("group", "row"):
            unit: Any = by
            first = await bus.claim(by, PLAYED, 5, unit, holder)
            assert bus.ready(by, PLAYED, unit) == 0
            await bus._actor.cancel.remote(await last_ticket())
            second = await bus.claim(by, PLAYED, 5, unit, holder)
            assert second.groups == first.groups and [r.id for r in second.rows] == [r.id for r in first.rows]
            await bus.ack(second)
        await bus._actor.cancel.remote(await last_ticket())  # what is acknowledged stays so
        assert bus.ready("row", PLAYED, "row") == 0

    async def last_ticket() -> str:
        tickets = await bus._actor.undoable.remote()
        return str(tickets[-1])

    asyncio.run(check())


# --- values -----------------------------------------------------------------------------------------------------------


def test_readers_share_the_memory_of_large_columns_and_it_is_freed(bus: RayBus, crew: Crew) -> None:
    before = settled_bytes()
    rollout, readers = crew.take(bus, "rollout"), [crew.take(bus, f"train-{n}") for n in range(3)]
    ray.get(rollout.play_large.remote("a", 4), timeout=30)
    ray.get([reader.claim.remote(f"stage-{n}") for n, reader in enumerate(readers)], timeout=30)
    for found in ray.get([reader.look.remote("tokens") for reader in readers], timeout=30):
        assert found == [(500_000.0 * (m + 1), False, 0) for m in range(4)]
    assert 8 * MB <= stored_bytes() - before < 12 * MB  # once
    asyncio.run(bus.evict("a"))
    crew.rest()
    until(lambda: stored_bytes() - before < MB)
