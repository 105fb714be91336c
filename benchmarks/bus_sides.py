"""The contenders of bus.py: Relax's bus on Ray, a bare actor of few lines, and TransferQueue, each behind ``Side``."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

Row = dict[str, Any]
Groups = dict[str, dict[str, Row]]
"""Rows by id, by group; every group is put at once."""

COLUMNS = ("tokens", "logprobs", "versions", "values")
DTYPES = (np.int32, np.float32, np.int32, np.float32)


def make_groups(groups: int, rows: int, row_bytes: int, seed: int = 0) -> Groups:
    """Ragged rows: columns of different lengths, and rows between half and one and a half of ``row_bytes``."""
    rng = np.random.default_rng(seed)
    made: Groups = {}
    for g in range(groups):
        made[f"g{g}"] = {}
        for m in range(rows):
            share = rng.uniform(0.5, 1.5, len(COLUMNS)) * rng.uniform(0.5, 1.5)
            lengths = np.maximum(share * row_bytes / 4 / len(COLUMNS), 1).astype(int)
            made[f"g{g}"][f"g{g}/{m}/0"] = {
                name: (rng.random(length) * 1e6).astype(dtype)
                for name, dtype, length in zip(COLUMNS, DTYPES, lengths, strict=True)
            }
    return made


def renamed(groups: Groups, number: int) -> Groups:
    """The same rows under ids of their own."""
    return {f"{number}-{g}": {f"{number}-{id}": row for id, row in rows.items()} for g, rows in groups.items()}


def touched(rows: Mapping[str, Mapping[str, Any]]) -> float:
    """Looks at the end of every column; equal for equal rows."""
    return sum(float(row[name][-1]) + len(row[name]) for _, row in sorted(rows.items()) for name in COLUMNS)


def digest(rows: Mapping[str, Mapping[str, Any]]) -> float:
    """Of every value."""
    return sum(float(np.sum(row[name], dtype=np.float64)) for _, row in sorted(rows.items()) for name in COLUMNS)


class Side(ABC):
    """One end of a contender, in a process of its own: the producer's or the consumer's."""

    async def open(self, groups: Groups) -> None:
        """Announce groups, as a rollout does long before it has rows of them. Not timed."""

    @abstractmethod
    async def write(self, groups: Groups) -> None:
        """All groups at once, a put for each; returns when all puts are acknowledged."""

    async def put(self, groups: Groups) -> None:
        """The same, and whatever else it takes until the rows can be had."""
        await self.write(groups)

    @abstractmethod
    async def take(self, groups: int, rows: int) -> Mapping[str, Mapping[str, Any]]:
        """So many, by row id."""

    async def done(self, groups: Groups) -> None:
        """What was taken is not needed any more. Not timed."""

    @abstractmethod
    async def linger(self) -> None:
        """Wait for rows that never come."""


class RelaxSide(Side):
    """Claims, fencing, bounds, write-once columns and acknowledgement are on, as in a run."""

    def __init__(self, bus: Any, name: str) -> None:
        self.bus, self.holder = bus, bus.register(name)
        self.serial = 0
        self.step = 0

    async def open(self, groups: Groups) -> None:
        for group in groups:
            await self.bus.open_group(group, self.serial, None, self.holder)
            self.serial += 1

    async def put(self, groups: Groups) -> None:
        await asyncio.gather(*(self._play(group, rows) for group, rows in groups.items()))

    async def write(self, groups: Groups) -> None:
        await asyncio.gather(*(self.bus.put(rows, self.holder, group) for group, rows in groups.items()))

    async def _play(self, group: str, rows: dict[str, Row]) -> None:
        await self.bus.put(rows, self.holder, group)
        await self.bus.close_group(group, len(rows), self.holder)

    async def take(self, groups: int, rows: int) -> Mapping[str, Mapping[str, Any]]:
        needs = frozenset(COLUMNS)
        self.claim = await self.bus.claim("train", needs, groups, "group", self.holder, "started", exact=True)
        return {row.id: row.columns for row in self.claim.rows}

    async def done(self, groups: Groups) -> None:
        await self.bus.ack(self.claim, retain=self.step)
        self.bus.release(self.step)
        self.step += 1
        del self.claim

    async def linger(self) -> None:
        await self.bus.claim("nobody", frozenset({"never"}), 1, "row", self.holder)


class BareActor:
    """What one would write in an hour: rows in, rows out, and a wait until there are enough."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.came = asyncio.Event()

    async def put(self, rows: dict[str, Row]) -> int:
        self.rows.update(rows)
        self.came.set()
        return len(rows)

    async def get(self, count: int) -> dict[str, Row]:
        while len(self.rows) < count:
            self.came.clear()
            await self.came.wait()
        return {id: self.rows.pop(id) for id in list(self.rows)[:count]}


class BareSide(Side):
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def write(self, groups: Groups) -> None:
        await asyncio.gather(*(self.actor.put.remote(rows) for rows in groups.values()))

    async def take(self, groups: int, rows: int) -> Mapping[str, Mapping[str, Any]]:
        found: dict[str, Row] = await self.actor.get.remote(rows)
        return found

    async def linger(self) -> None:
        await self.actor.get.remote(10**9)


class QueueSide(Side):
    """TransferQueue 0.1.11: rows as jagged tensors, a partition for each round; consumers poll."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ.setdefault("TQ_PRE_ALLOC_SAMPLE_NUM", "256")
        self.tq: Any = import_module("transfer_queue")
        self.tq.init(import_module("omegaconf").OmegaConf.create(config))
        self.client = self.tq.get_client()

    async def write(self, groups: Groups) -> None:
        await asyncio.gather(*(self._put(group, rows) for group, rows in groups.items()))

    async def _put(self, group: str, rows: dict[str, Row]) -> None:
        import torch

        columns = {name: [torch.from_numpy(row[name]) for row in rows.values()] for name in COLUMNS}
        fields = {name: torch.nested.nested_tensor(some, layout=torch.jagged) for name, some in columns.items()}
        batch = import_module("tensordict").TensorDict(fields, batch_size=[len(rows)])
        await self.tq.async_kv_batch_put(keys=list(rows), partition_id=group.partition("-")[0], fields=batch)

    async def take(self, groups: int, rows: int) -> Mapping[str, Mapping[str, Any]]:
        """Polls until the newest partition has all rows of its round."""
        while True:
            listed = await asyncio.to_thread(self.tq.kv_list)
            full = [(partition, keys) for partition, keys in listed.items() if len(keys) == rows]
            if full:
                break
            await asyncio.sleep(0.001)
        partition, keys = full[-1]
        names = list(keys)
        data = await self.tq.async_kv_batch_get(keys=names, partition_id=partition, select_fields=list(COLUMNS))
        columns = {name: [t.numpy() for t in data[name].unbind()] for name in COLUMNS}
        return {id: {name: columns[name][i] for name in COLUMNS} for i, id in enumerate(names)}

    async def done(self, groups: Groups) -> None:
        for partition in {group.partition("-")[0] for group in groups}:
            await self.tq.async_kv_clear(keys=[id for rows in groups.values() for id in rows], partition_id=partition)

    async def linger(self) -> None:
        """With polling_mode an ask for what is not there comes back empty at once."""
        while True:
            await asyncio.to_thread(
                self.client.get_meta,
                data_fields=["never"],
                batch_size=1,
                partition_id="never",
                task_name="nobody",
                mode="fetch",
            )
            await asyncio.sleep(0.01)


def make_side(name: str, handle: Any, role: str) -> Side:
    if name == "relax":
        return RelaxSide(handle, role)
    return BareSide(handle) if name == "bare actor" else QueueSide(handle)
