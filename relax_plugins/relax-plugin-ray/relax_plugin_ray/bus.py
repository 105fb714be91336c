"""The bus for every process of a cluster: a client in front of the actor that holds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from relax_core.bus import Bus, BusState, By, Claim, Holder, Order
from relax_core.interfaces import Columns, Row
from relax_plugin_ray.boxes import NAMESPACE, Box, dumps
from relax_plugin_ray.bus_actor import BusActor, Granted, Opaque
from relax_plugin_ray.bus_calls import Calls
from relax_plugin_ray.bus_table import RawRow, Table, from_table, to_table
from relax_plugin_ray.references import Attached, Packed, Packer

if TYPE_CHECKING:
    from pathlib import Path

    from relax_plugin_ray.media import SharedMedia

CONCURRENT = 100_000
"""Calls that may be in the actor at once; each consumer that waits is one."""


class RayBus(Bus):
    """See ``relax_core.bus``: the same contract, for any number of processes. Picklable: hand it to other actors.

    Methods that are no coroutines, and the gauges, block until the actor answers. So do ``open_group`` and ``evict``:
    they never suspend their caller, so that what it looked up before still holds for its process. A coroutine that is
    cancelled while it waits for room or for something to claim has done nothing, also if the actor had granted it
    already. Any other call that has begun is done, whether its caller still wants the answer or not.

    Columns of claimed rows are ``Packed``: arrays are read-only views of what was put, and rows pickle as references.
    ``media``: this process's store; puts share its features with whoever claims the rows. It is not pickled.
    """

    def __init__(self, actor: Any, name: str, media: SharedMedia | None = None) -> None:
        self._actor, self._name = actor, name
        self._calls = Calls(actor)
        self.media = media

    @classmethod
    def start(
        cls,
        max_rows: int,
        max_bytes: int,
        media: SharedMedia | None = None,
        directory: Path | None = None,
        **options: Any,
    ) -> RayBus:
        """A new bus. ``options`` of its actor, such as its placement; it ends with the last handle or its maker.

        ``directory``: of the run, for the actor's log.
        """
        name = f"relax-bus-{os.urandom(6).hex()}"
        defaults = {"num_cpus": 0, "max_concurrency": CONCURRENT, "name": name, "namespace": NAMESPACE}
        actor = ray.remote(BusActor).options(**(defaults | options)).remote(max_rows, max_bytes, directory)
        return cls(actor, name, media)

    def __reduce__(self) -> tuple[Any, ...]:
        return (RayBus, (self._actor, self._name))

    # --- holders ------------------------------------------------------------------------------------------------------

    def register(self, name: str) -> Holder:
        return Holder(*self._calls.blocking("register", name))

    def declare_dead(self, holder: Holder) -> None:
        self._calls.blocking("declare_dead", holder)

    def orphans(self) -> list[str]:
        return list(self._calls.blocking("orphans"))

    # --- groups and rows ----------------------------------------------------------------------------------------------

    async def open_group(self, group: str, serial: int, task: Any, holder: Holder) -> None:
        self._calls.blocking("open_group", group, serial, Opaque(dumps(task)), holder)

    async def put(self, columns: Mapping[str, Columns], holder: Holder, group: str | None = None) -> int:
        rows, new = self._packed(columns)
        if group is not None and self.media is not None:
            new += self._share(rows)
        return int(await self._calls.ask("put", to_table(rows), holder, group, boxes=new))

    async def close_group(self, group: str, n_rows: int, holder: Holder) -> bool:
        return bool(await self._calls.ask("close_group", group, n_rows, holder))

    async def evict(self, group: str) -> list[Row]:
        return self._rows(self._calls.blocking("evict", group))

    # --- stages -------------------------------------------------------------------------------------------------------

    async def claim(
        self,
        stage: str,
        needs: frozenset[str],
        count: int,
        by: By,
        holder: Holder,
        order: Order = "any",
        exact: bool = False,
    ) -> Claim:
        granted: Granted = await self._calls.ask("claim", stage, needs, count, by, holder, order, exact)
        return Claim(stage, holder, tuple(self._rows(granted.rows)), granted.groups)

    async def ack(self, claim: Claim, retain: int | None = None) -> tuple[str, ...]:
        return tuple(await self._calls.ask("ack", _bare(claim), retain))

    async def finish(self, claim: Claim, columns: Mapping[str, Columns]) -> tuple[str, ...]:
        rows, new = self._packed(columns)
        return tuple(await self._calls.ask("finish", _bare(claim), to_table(rows), boxes=new))

    # --- trained rows, snapshots, the end -----------------------------------------------------------------------------

    def retained(self, step: int) -> list[Row]:
        return self._rows(self._calls.blocking("retained", step))

    def release(self, step: int) -> list[Row]:
        return self._rows(self._calls.blocking("release", step))

    def snapshot(self) -> BusState:
        """With values, not references: it outlives the cluster."""
        state: BusState = self._calls.blocking("snapshot")
        for group in state.groups:
            group.task = cloudpickle.loads(group.task.data)
            for row in group.rows.values():
                row.columns = dict(Packed(row.columns))
        return state

    def restore(self, state: BusState) -> None:
        groups, boxes = [], []
        for saved in state.groups:
            group, packer = saved.copy(keep_holders=True), Packer(self._name)
            group.task = Opaque(dumps(group.task))
            for row in group.rows.values():
                row.columns = packer.raw(row.columns)
            groups.append(group)
            boxes += [box for box in (packer.box(),) if box is not None]
        self._calls.blocking("restore", replace(state, groups=tuple(groups)), boxes=boxes)

    async def close(self) -> None:
        await self._calls.ask("close")

    # --- gauges -------------------------------------------------------------------------------------------------------

    @property
    def late(self) -> int:  # type: ignore[override]
        return int(self._calls.blocking("late"))

    @property
    def repeated(self) -> int:  # type: ignore[override]
        return int(self._calls.blocking("repeated"))

    @property
    def overfull(self) -> int:  # type: ignore[override]
        return int(self._calls.blocking("overfull"))

    @property
    def rows(self) -> int:
        return int(self._calls.blocking("rows"))

    @property
    def bytes(self) -> int:
        return int(self._calls.blocking("bytes"))

    @property
    def retained_rows(self) -> int:
        return int(self._calls.blocking("retained_rows"))

    @property
    def groups(self) -> int:
        return int(self._calls.blocking("groups"))

    @property
    def full(self) -> bool:
        return bool(self._calls.blocking("full"))

    def holds(self, group: str) -> bool:
        return bool(self._calls.blocking("holds", group))

    def held_rows(self) -> list[Row]:
        return self._rows(self._calls.blocking("held_rows"))

    def ready(self, stage: str, needs: frozenset[str], by: By = "group") -> int:
        return int(self._calls.blocking("ready", stage, needs, by))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _rows(self, table: Table) -> list[Row]:
        rows = [Row(id, group, Packed(raw)) for id, group, raw in from_table(table)]
        if self.media is not None:
            self.media.know_rows(rows)
        return rows

    def _packed(self, columns: Mapping[str, Columns]) -> tuple[list[RawRow], list[Box]]:
        """Columns by row id as they travel, and the box with their values, if they need one."""
        packer = Packer(self._name)
        rows = [(id, "", packer.raw(row)) for id, row in columns.items()]
        return rows, [box for box in (packer.box(),) if box is not None]

    def _share(self, rows: list[RawRow]) -> list[Box]:
        """Attach the features of new rows' media to them; returns their boxes."""
        assert self.media is not None
        found: dict[str, Any] = {}
        for _, _, raw in rows:
            value = raw.get("media")
            if isinstance(value, tuple) and value:
                keys = [ref.key for ref in value]
                shared = self.media.share(keys, self._name)
                found |= shared
                raw["media"] = Attached(value, tuple(shared.values()))
        return [shared.box for shared in found.values() if shared.box is not None]


def _bare(claim: Claim) -> Claim:
    """Without its rows' columns, which the actor has."""
    return replace(claim, rows=tuple(Row(row.id, row.group, {}) for row in claim.rows))
