"""What claims of the bus behind an actor give: references that travel cheaply, to the very values that were put."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle

from relax_core.bus import Claim
from relax_core.types import Group, Sample, Task, Trajectory
from relax_plugin_ray.bus import RayBus
from relax_plugin_ray.references import Packed
from tests.cluster.object_store import settled_bytes, stored_bytes

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
PLAYED = frozenset({"tokens"})
MB = np.dtype(np.float32).itemsize * 250_000


@pytest.fixture
def bus(cluster: str) -> Iterator[RayBus]:
    made = RayBus.start(1000, 10**9)
    yield made
    ray.kill(made._actor)


def large(group: str, rows: int = 2) -> dict[str, Any]:
    return {f"{group}/{m}/0": {"tokens": np.full(500_000, m + 1, np.float32), "m": m} for m in range(rows)}


@ray.remote(num_cpus=0)
class Holds:
    async def hold(self, rows: Any) -> float:
        """Keep rows of another process, and read them."""
        self.kept = rows
        return float(sum(row.columns["tokens"].sum() for row in rows))


def test_rows_travel_on_as_references(bus: RayBus) -> None:
    async def play() -> Claim:
        holder = bus.register("train")
        await bus.open_group("a", 0, None, holder)
        await bus.put(large("a"), holder, "a")
        await bus.close_group("a", 2, holder)
        claim = await bus.claim("train", PLAYED, 1, "group", holder)
        # columns that are references already are put on without being read
        await bus.open_group("b", 1, None, holder)
        more = {f"b/{i}/0": ChainMap({"reward": 0.5}, row.columns) for i, row in enumerate(claim.rows)}  # type: ignore[arg-type]
        bytes_before, stored = bus.bytes, settled_bytes()
        await bus.put(more, holder, "b")
        assert bus.bytes - bytes_before > 4 * MB and stored_bytes() == stored
        return claim

    claim = asyncio.run(play())
    for row in claim.rows:
        columns: Any = ChainMap({"reward": 1.0}, row.columns)  # type: ignore[arg-type]
        for what in (row, columns):
            assert len(cloudpickle.dumps(what)) < 2000  # type: ignore[no-untyped-call]
        assert sorted(columns) == ["reward", "tokens"] and columns["tokens"] is row.columns["tokens"]
    before, other = settled_bytes(), Holds.remote()  # type: ignore[attr-defined]
    assert ray.get(other.hold.remote(claim.rows), timeout=60) == 1_500_000.0
    assert stored_bytes() - before < MB
    assert [row.columns["reward"] for row in bus.held_rows() if row.group == "b"] == [0.5, 0.5]


def made_group(rows: int = 3) -> tuple[Group, dict[str, dict[str, Any]]]:
    task = Task("t", ())
    group = Group("a", 0, task, 0)
    columns = {}
    for m in range(rows):
        positions = np.arange(30, dtype=np.int32).reshape(3, 10) + m
        sample = Sample([1] * 10, [1] * 10, [0.0] * 10, [0] * 10, (), positions)
        trajectory = Trajectory(task, 0, m, samples=[sample], rewards={"exact": None})
        group.trajectories.append(trajectory)
        columns[f"a/{m}/0"] = {
            "tokens": np.arange(10),
            "positions": positions,
            "trajectory": trajectory,
            "group": group,
        }
    return group, columns


def test_objects_keep_their_identity_within_a_put(bus: RayBus) -> None:
    names = frozenset({"group", "trajectory", "positions", "tokens"})
    group, columns = made_group()

    async def play() -> Claim:
        holder = bus.register("rollout")
        await bus.open_group("a", 0, group.task, holder)
        await bus.put(columns, holder, "a")
        await bus.close_group("a", 3, holder)
        return await bus.claim("here", names, 1, "group", holder)

    claim = asyncio.run(play())
    assert all(row.columns["group"] is group for row in claim.rows)  # this process has put it

    def there(rows: list[Any]) -> bool:
        found = rows[0].columns["group"]
        for m, row in enumerate(rows):
            assert row.columns["group"] is found and row.columns["trajectory"] is found.trajectories[m]
            assert row.columns["trajectory"].task is found.task
            positions = found.trajectories[m].samples[0].positions
            assert positions.tolist() == row.columns["positions"].tolist() and positions.shape == (3, 10)
            assert positions.ctypes.data == row.columns["positions"].ctypes.data  # stored once
        return bool(found.trajectories[1].rewards == {"exact": None})

    remote: Any = ray.remote(there)
    assert ray.get(remote.remote(list(claim.rows)), timeout=30)
    saved = pickle.loads(pickle.dumps(bus.snapshot()))
    rows = [row.columns for row in saved.groups[0].rows.values()]
    assert all(row["trajectory"] is rows[0]["group"].trajectories[m] for m, row in enumerate(rows))


@pytest.mark.parametrize("rows", [3, 40], ids=["small", "large"])
def test_values_of_every_kind_come_out_as_they_went_in(bus: RayBus, rows: int) -> None:
    shared = np.arange(10_000.0)
    values: dict[str, Any] = {
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.int8),
        "strided": np.arange(20)[::2],
        "transposed": np.arange(6).reshape(2, 3).T,
        "bool": np.array([True, False]),
        "big_endian": np.arange(3, dtype=">i4"),
        "texts": np.array(["a", "bc"]),
        "pickled": pickle.loads(pickle.dumps(np.arange(3.0))),
        "records": np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
        "objects": np.array([None, {"a": 1}], object),
        "number": np.float32(0.1),
        "nothing": None,
        "text": "x" * 5000,
        "tuple": (1, ("two", None)),
        "dict": {"a": [1, 2]},
    }

    async def check() -> None:
        holder = bus.register("x")
        await bus.open_group("a", 0, None, holder)
        put = {f"a/{m}/0": values | {"shared": shared, "own": shared + m} for m in range(rows)}
        await bus.put(put, holder, "a")
        await bus.put({"a/0/0": {"only": 1}}, holder)

    asyncio.run(check())

    def there(found: list[Any]) -> None:
        for m, row in enumerate(found):
            assert isinstance(row.columns, Packed)
            for name, value in values.items():
                other = row.columns[name]
                assert type(other) is type(value), name
                if isinstance(value, np.ndarray):
                    is_array = row.columns.raw[name].index >= 0  # others are no columns for a trainer
                    assert is_array == (name not in ("records", "objects")), name
                    assert other.dtype == value.dtype and other.shape == value.shape, name
                    assert other.tolist() == value.tolist(), name
                else:
                    assert other == value, name
            assert row.columns["own"].tolist() == (shared + m).tolist()
            assert row.columns["shared"] is found[0].columns["shared"]
            assert ("only" in row.columns) == (m == 0)

    remote: Any = ray.remote(there)
    found = bus.held_rows()
    there(found)
    ray.get(remote.remote(found), timeout=30)
