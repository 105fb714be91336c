"""Features of media are put in the object store once, and other processes read them in place."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle

from relax_core.errors import DataError
from relax_core.types import MediaRef
from relax_plugin_ray.bus import RayBus
from relax_plugin_ray.media import SharedMedia
from tests.cluster.object_store import settled_bytes, stored_bytes

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
NEEDS = frozenset({"tokens", "media"})


def features(value: float, size: int = 300_000) -> dict[str, Any]:
    return {"pixels": np.full(size, value, np.float32), "grid": np.array([1, 2, 3])}


def sent(shared: dict[str, Any]) -> dict[str, Any]:
    """As it comes to another process."""
    found: dict[str, Any] = cloudpickle.loads(cloudpickle.dumps(shared))  # type: ignore[no-untyped-call]
    return found


class Reader:
    """Another process with its own store."""

    def __init__(self) -> None:
        self.media = SharedMedia({}, 10**9)

    async def know(self, shared: dict[str, Any]) -> int:
        self.media.know(shared)
        return self.media.nbytes

    async def get(self, key: str) -> tuple[float, bool, list[int]]:
        found = self.media.get(key)
        return float(found["pixels"].sum()), found["pixels"].flags.writeable, found["grid"].tolist()

    async def call(self, name: str, *values: Any) -> Any:
        found: Any = getattr(self.media, name)(*values)
        return found

    async def play(self, bus: RayBus, group: str, serial: int, key: str, value: float) -> None:
        bus.media, holder = self.media, bus.register("rollout")
        self.media.put(key, features(value))
        await bus.open_group(group, serial, None, holder)
        rows = {f"{group}/{m}/0": {"tokens": np.arange(3), "media": (MediaRef("image", key, m, 1),)} for m in range(3)}
        await bus.put(rows, holder, group)
        await bus.close_group(group, 3, holder)

    async def claim(self, bus: RayBus) -> list[tuple[list[str], str, tuple[float, bool, list[int]]]]:
        bus.media, holder = self.media, bus.register("train")
        self.claimed = await bus.claim("train", NEEDS, 1, "group", holder)
        key = self.claimed.rows[0].columns["media"][0].key
        return [(sorted(row.columns), row.columns["media"][0].key, await self.get(key)) for row in self.claimed.rows]

    async def drop(self) -> bool:
        key = self.claimed.rows[0].columns["media"][0].key
        self.media.retain([key])
        del self.claimed
        kept = key in self.media
        self.media.release([key])
        return kept and key not in self.media


@pytest.fixture(scope="module")
def readers(cluster: str) -> list[Any]:
    actor: Any = ray.remote(Reader)
    return [actor.options(num_cpus=0).remote() for _ in range(2)]


@pytest.fixture
def bus(cluster: str) -> Iterator[RayBus]:
    made = RayBus.start(100, 10**9)
    yield made
    ray.kill(made._actor)


def test_shared_features_are_read_in_place_by_every_process_that_knows_them(readers: list[Any]) -> None:
    media, before = SharedMedia({}, 10**9), settled_bytes()
    for n, key in enumerate("ab"):
        media.put(key, features(n + 1))
    shared = media.share(["a", "b", "a", "nowhere"])
    assert sorted(shared) == ["a", "b"] and shared["a"].nbytes == media.size("a") == 1_200_024
    assert media.share(["a"])["a"] is shared["a"]  # put once
    for reader in readers:
        assert ray.get(reader.know.remote(shared), timeout=60) == 0
        assert ray.get(reader.get.remote("b"), timeout=30) == (600_000.0, False, [1, 2, 3])
        assert ray.get(reader.call.remote("size", ["a", "b", "b"]), timeout=30) == 2 * 1_200_024
    assert 2_400_000 <= stored_bytes() - before < 3_000_000
    for reader in readers:
        ray.get([reader.call.remote("retain", ["a", "b"]), reader.call.remote("release", ["a", "b"])], timeout=30)
        with pytest.raises(DataError, match="media b: not in the store"):
            ray.get(reader.get.remote("b"), timeout=30)


def test_holds_on_known_features_come_in_pairs(cluster: str) -> None:
    here, there = SharedMedia({}, 10**9), SharedMedia({}, 10**9)
    here.put("a", features(1.0, size=3))
    there.put("own", features(2.0, size=3))
    there.know(sent(here.share(["a"])))
    there.retain(["a", "own", "a"])
    there.release(["a"])
    for keys in (["a", "a"], ["own", "own"], ["a", "unknown"]):
        with pytest.raises(DataError, match="must come in pairs"):
            there.release(keys)
    with pytest.raises(DataError, match="media unknown"):
        there.retain(["a", "unknown"])
    assert there.get("a")["pixels"].tolist() == [1.0] * 3
    there.release(["a", "own"])
    assert "a" not in there and "own" in there
    with pytest.raises(DataError, match="media a"):
        there.release(["a"])


def test_what_is_only_known_leaves_when_there_is_no_room(cluster: str) -> None:
    here, there = SharedMedia({}, 10**9), SharedMedia({}, 100)
    for key in "abc":
        here.put(key, features(1.0, size=3))  # 36 bytes
    there.know(sent(here.share(["a"])))
    there.retain(["a"])
    for key in "bc":
        there.know(sent(here.share([key])))
    assert [key in there for key in "abc"] == [True, True, True]
    for key in "de":
        here.put(key, features(1.0, size=3))
        there.know(sent(here.share([key])))
    assert [key in there for key in "abcde"] == [True, False, False, True, True]


def test_the_bus_brings_features_with_the_rows_and_keeps_them(bus: RayBus, readers: list[Any]) -> None:
    """Although the process that made them died; they show in no column, and go when the rows and all holds have."""
    actor: Any = ray.remote(Reader)
    maker = actor.options(num_cpus=0).remote()
    ray.get(maker.play.remote(bus, "a", 0, "picture", 2.0), timeout=60)
    ray.kill(maker)
    found = ray.get(readers[0].claim.remote(bus), timeout=60)
    assert found == [(["media", "tokens"], "picture", (600_000.0, False, [1, 2, 3]))] * 3
    bus.media = SharedMedia({}, 10**9)
    rows = bus.held_rows()
    bus.media.retain([ref.key for row in rows for ref in row.columns["media"]])
    assert bus.media.get("picture")["pixels"][7] == 2.0
    assert asyncio.run(bus.evict("a"))[0].columns["media"][0].key == "picture"
    assert ray.get(readers[0].drop.remote(), timeout=30)
    shared = bus.media.share(["picture"])  # no row is on the bus, but this process holds it
    ray.get(readers[1].know.remote(shared), timeout=30)
    assert ray.get(readers[1].get.remote("picture"), timeout=30)[0] == 600_000.0
    del shared
    bus.media.release([ref.key for row in rows for ref in row.columns["media"]])
    del rows
    assert "picture" not in bus.media


def test_rows_whose_media_are_elsewhere_pass_through(bus: RayBus) -> None:
    async def check() -> None:
        holder = bus.register("x")
        bus.media = SharedMedia({}, 1000)
        await bus.open_group("a", 0, None, holder)
        ref = MediaRef("audio", "elsewhere", 0, 1)
        await bus.put({"a/0/0": {"tokens": np.arange(3), "media": (ref,)}, "a/1/0": {"media": ()}}, holder, "a")
        assert [row.columns["media"] for row in bus.held_rows()] == [(ref,), ()]

    asyncio.run(check())
