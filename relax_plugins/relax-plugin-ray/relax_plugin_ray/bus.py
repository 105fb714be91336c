"""The bus for every process of a cluster: a client in front of the actor that holds it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from relax_core.bus import Bus, BusError, BusState, By, Claim, Holder, Order
from relax_core.interfaces import Columns, Row
from relax_plugin_ray.bus_actor import BusActor, Failed, Granted, Opaque
from relax_plugin_ray.bus_table import RawRow, Table, from_table, to_table
from relax_plugin_ray.references import NAMESPACE, Attached, Box, Packed, Packer, wait

if TYPE_CHECKING:
    from relax_plugin_ray.media import SharedMedia

CONCURRENT = 100_000
"""Calls that may be in the actor at once; each consumer that waits is one."""


class RayBus(Bus):
    """See ``relax_core.bus``: the same contract, for any number of processes. Picklable: hand it to other actors.

    Methods that are no coroutines, and the gauges, block until the actor answers. A coroutine that is cancelled while
    it waits for room or for something to claim has done nothing, also if the actor had granted it already. Any other
    call that has begun is done, whether its caller still wants the answer or not.

    Columns of claimed rows are ``Packed``: arrays are read-only views of what was put, and rows pickle as references.
    ``media``: this process's store; puts share its features with whoever claims the rows. It is not pickled.
    """

    def __init__(self, actor: Any, name: str, media: SharedMedia | None = None) -> None:
        self._actor, self._name = actor, name
        self.media = media
        self._prefix = f"{os.urandom(6).hex()}-"
        self._tickets = itertools.count()

    @classmethod
    def start(cls, max_rows: int, max_bytes: int, media: SharedMedia | None = None, **options: Any) -> RayBus:
        """A new bus. ``options`` of its actor, such as its placement; it ends with the last handle or its maker."""
        name = f"relax-bus-{os.urandom(6).hex()}"
        defaults = {"num_cpus": 0, "max_concurrency": CONCURRENT, "name": name, "namespace": NAMESPACE}
        actor = ray.remote(BusActor).options(**(defaults | options)).remote(max_rows, max_bytes)
        return cls(actor, name, media)

    def __reduce__(self) -> tuple[Any, ...]:
        return (RayBus, (self._actor, self._name))

    # --- holders ------------------------------------------------------------------------------------------------------

    def register(self, name: str) -> Holder:
        return Holder(*self._ask("register", name))

    def declare_dead(self, holder: Holder) -> None:
        self._ask("declare_dead", holder)

    def orphans(self) -> list[str]:
        return list(self._ask("orphans"))

    # --- groups and rows ----------------------------------------------------------------------------------------------

    async def open_group(self, group: str, serial: int, task: Any, holder: Holder) -> None:
        await self._call("open_group", group, serial, Opaque(cloudpickle.dumps(task)), holder)

    async def put(self, columns: Mapping[str, Columns], holder: Holder, group: str | None = None) -> int:
        packer = Packer(self._name)
        rows = [(id, "", packer.raw(row)) for id, row in columns.items()]
        new = [box for box in (packer.box(),) if box is not None]
        if group is not None and self.media is not None:
            new += self._share(rows)
        large = [box for box in new if box.ref is not None]
        ticket, contents = self._ticket(), [box.ref for box in large]
        return int(
            await self._wait(ticket, self._actor.put.remote(ticket, to_table(rows), holder, group, large, *contents))
        )

    async def close_group(self, group: str, n_rows: int, holder: Holder) -> bool:
        return bool(await self._call("close_group", group, n_rows, holder))

    async def evict(self, group: str) -> list[Row]:
        return self._rows(await self._call("evict", group))

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
        ticket = self._ticket()
        call = self._actor.claim.remote(ticket, stage, needs, count, by, holder, order, exact)
        granted: Granted = await self._wait(ticket, call)
        return Claim(stage, holder, tuple(self._rows(granted.rows)), granted.groups)

    async def ack(self, claim: Claim, retain: int | None = None) -> tuple[str, ...]:
        rows = [(row.id, row.group) for row in claim.rows]
        answer = await _answer(self._actor.ack.remote(claim.stage, claim.holder, rows, claim.groups, retain))
        return tuple(_opened(answer))

    # --- trained rows, snapshots, the end -----------------------------------------------------------------------------

    def retained(self, step: int) -> list[Row]:
        return self._rows(self._ask("retained", step))

    def release(self, step: int) -> list[Row]:
        return self._rows(self._ask("release", step))

    def snapshot(self) -> BusState:
        """With values, not references: it outlives the cluster."""
        state: BusState = self._ask("snapshot")
        for group in state.groups:
            group.task = cloudpickle.loads(group.task.data)
            for row in group.rows.values():
                row.columns = dict(Packed(row.columns))
        return state

    def restore(self, state: BusState) -> None:
        groups, boxes = [], []
        for saved in state.groups:
            group, packer = saved.copy(keep_holders=True), Packer(self._name)
            group.task = Opaque(cloudpickle.dumps(group.task))
            for row in group.rows.values():
                row.columns = packer.raw(row.columns)
            groups.append(group)
            boxes += [box for box in (packer.box(),) if box is not None and box.ref is not None]
        packed = replace(state, groups=tuple(groups))
        _opened(_waited(self._actor.restore.remote(packed, boxes, *(box.ref for box in boxes))))

    async def close(self) -> None:
        await self._call("close")

    # --- gauges -------------------------------------------------------------------------------------------------------

    @property
    def late(self) -> int:  # type: ignore[override]
        return int(self._ask("late"))

    @property
    def repeated(self) -> int:  # type: ignore[override]
        return int(self._ask("repeated"))

    @property
    def overfull(self) -> int:  # type: ignore[override]
        return int(self._ask("overfull"))

    @property
    def rows(self) -> int:
        return int(self._ask("rows"))

    @property
    def bytes(self) -> int:
        return int(self._ask("bytes"))

    @property
    def retained_rows(self) -> int:
        return int(self._ask("retained_rows"))

    @property
    def groups(self) -> int:
        return int(self._ask("groups"))

    @property
    def full(self) -> bool:
        return bool(self._ask("full"))

    def holds(self, group: str) -> bool:
        return bool(self._ask("holds", group))

    def held_rows(self) -> list[Row]:
        return self._rows(self._ask("held_rows"))

    def ready(self, stage: str, needs: frozenset[str], by: By = "group") -> int:
        return int(self._ask("ready", stage, needs, by))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _ticket(self) -> str:
        return f"{self._prefix}{next(self._tickets)}"

    def _ask(self, name: str, *values: Any) -> Any:
        return _opened(_waited(self._actor.call.remote(name, *values)))

    async def _call(self, name: str, *values: Any) -> Any:
        return _opened(await _answer(self._actor.call.remote(name, *values)))

    async def _wait(self, ticket: str, ref: Any) -> Any:
        try:
            return _opened(await _answer(ref))
        except asyncio.CancelledError:
            self._actor.cancel.remote(ticket)
            raise

    def _rows(self, table: Table) -> list[Row]:
        rows = [Row(id, group, Packed(raw)) for id, group, raw in from_table(table)]
        if self.media is not None:
            self.media.know_rows(rows)
        return rows

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
        return [shared.box for shared in found.values()]


async def _answer(ref: Any) -> Any:
    try:
        return await ref
    except ray.exceptions.RayActorError as error:
        raise _dead(error) from error


def _waited(ref: Any) -> Any:
    try:
        return wait(ref)
    except ray.exceptions.RayActorError as error:
        raise _dead(error) from error


def _dead(error: Exception) -> BusError:
    return BusError(f"bus: its actor is gone ({type(error).__name__}); resume the run from its last checkpoint")


def _opened(answer: Any) -> Any:
    """What was answered. Raises what the bus raised."""
    if isinstance(answer, Failed):
        raise answer.error
    return answer
