"""The old policy as actors: each holds the newest weights, and computes rows of the step beside the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_core.errors import RelaxError
from relax_core.interfaces import Columns, Row
from relax_core.old_policy import OldPolicy
from relax_plugin_ray.pool import Pool, answer
from relax_plugin_ray.rows import opened, packed
from relax_plugin_ray.worker import adapter_of, run_of

if TYPE_CHECKING:
    from relax_core.torch.policy_copy import PolicyCopy
    from relax_core.types import Version
    from relax_core.weights import WeightUpdate
    from relax_plugin_ray.bus_table import Table
    from relax_plugin_ray.media import SharedMedia

Actor = Any
NEEDED = frozenset({"tokens", "mask", "positions", "media"})
"""Columns that a forward reads."""


class OldPolicyActor:
    """To be made with ``ray.remote``, never restarted by Ray: who made it does."""

    def __init__(self, resolved: Mapping[str, Any], role: str) -> None:
        self._resolved, self._role = resolved, role
        self._parts: tuple[PolicyCopy, SharedMedia] | None = None

    def __repr__(self) -> str:
        return self._role

    @property
    def _built(self) -> tuple[PolicyCopy, SharedMedia]:
        if self._parts is None:
            raise RelaxError(f"{self._role}: it was asked to work before it was ready")
        return self._parts

    async def ready(self, update: WeightUpdate | None) -> None:
        """Build the model; with these weights, if there are any yet."""
        from relax_core.torch.policy_copy import PolicyCopy

        run = run_of(self._resolved, self._role)
        adapter, media = adapter_of(run)
        self._parts = PolicyCopy(run, adapter), media
        if update is not None:
            await self.load_weights(update)

    async def forward(self, table: Table, version: Version) -> list[Columns]:
        copy, media = self._built
        with opened(table, media) as rows:
            return await copy.forward(rows, version)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._built[0].load_weights(update)


class RemoteOldPolicy(OldPolicy):
    """Replicas beside each other. Rows go to the least busy one; what one that dies had is computed again.

    ``create`` makes the actor of a place; more than ``restarts`` of them within ten minutes end the run. ``media``: the
    controller's store.
    """

    apart = True

    def __init__(
        self,
        create: Callable[[int], Actor],
        replicas: int,
        restarts: int,
        note: Callable[[str], None],
        media: SharedMedia,
    ) -> None:
        self.pool = Pool("old_policy", create, replicas, restarts, note, self._ready)
        self._media = media
        self._update: WeightUpdate | None = None
        self._loaded: Version | None = None
        self._news = asyncio.Condition()

    async def _ready(self, actor: Actor) -> None:
        given = self._update
        await answer(actor.ready.remote(given))
        while given is not self._update:  # published meanwhile; who publishes asked the one that died
            given = self._update
            await answer(actor.load_weights.remote(given))

    async def forward(self, rows: Sequence[Row], version: Version) -> list[Columns]:
        """See ``OldPolicy``. Waits for a version that is still on its way."""
        async with self._news:
            await self._news.wait_for(lambda: self._loaded is not None and self._loaded >= version)
        table = packed(rows, self._media, NEEDED)
        found: list[Columns] = await self.pool.call(lambda actor: actor.forward.remote(table, version))
        return found

    async def load_weights(self, update: WeightUpdate) -> None:
        self._update = update
        await self.pool.all(lambda actor: actor.load_weights.remote(update))
        async with self._news:
            self._loaded = update.manifest.version
            self._news.notify_all()
