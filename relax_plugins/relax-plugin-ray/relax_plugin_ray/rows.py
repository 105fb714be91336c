"""How rows and the plan of a step reach the trainer's ranks: as references, read where they are computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.errors import RelaxError
from relax_core.interfaces import Columns, Cut, Row
from relax_plugin_ray.bus_table import RawRow, Table, from_table, to_table
from relax_plugin_ray.references import Attached, Cell, Packed, Packer, small

if TYPE_CHECKING:
    from relax_plugin_ray.media import SharedMedia


def packed(rows: Sequence[Row], media: SharedMedia, names: frozenset[str] | None = None) -> Table:
    """What a rank needs of rows: arrays, numbers and media, as references where they are references already.

    Groups, trajectories and plays stay where they are. ``names``: of the columns; default: of all.
    """
    packer = Packer(None)
    raws: list[RawRow] = [(row.id, row.group, _raw(packer, row.columns, names)) for row in rows]
    for _, _, raw in raws:
        value = raw.get("media")
        if isinstance(value, tuple) and value:
            shared = media.share(ref.key for ref in value)
            raw["media"] = Attached(value, tuple(shared.values()))
    packer.box()
    return to_table(raws)


def _raw(packer: Packer, columns: Columns, names: frozenset[str] | None) -> dict[str, Any]:
    if isinstance(columns, Packed):
        wanted = ((name, value) for name, value in columns.raw.items() if names is None or name in names)
        return {name: v for name, v in wanted if type(v) is not Cell or v.index >= 0 or name == "media"}
    if maps := getattr(columns, "maps", None):
        merged: dict[str, Any] = {}
        for part in reversed(maps):
            merged |= _raw(packer, part, names)
        return merged
    wanted = ((name, value) for name, value in columns.items() if names is None or name in names)
    return packer.raw({name: v for name, v in wanted if isinstance(v, np.ndarray) or small(v)})


@contextmanager
def opened(table: Table, media: SharedMedia) -> Iterator[list[Row]]:
    """The rows, whose media are in the store while the block is open. Raises DataError where features are missing."""
    rows = [Row(id, group, Packed(raw)) for id, group, raw in from_table(table)]
    media.know_rows(rows)
    keys = [ref.key for row in rows for ref in row.columns["media"]]
    media.retain(keys)
    try:
        yield rows
    finally:
        media.release(keys)


class PeerFeed:
    """A ``Feed`` (see relax_core.torch.shares) by calls from rank 0's actor to the other ranks' ones.

    ``peers``: on rank 0, the actors by rank. ``patience_s``: how long a rank waits for what it was told of.
    """

    def __init__(self, media: SharedMedia, peers: Sequence[Any], patience_s: float) -> None:
        self._media, self._peers, self._patience_s = media, peers, patience_s
        self._sent = 0
        self._came: dict[int, Table] = {}
        self._news = threading.Condition()

    def send(self, shares: Sequence[Sequence[Row]]) -> Sequence[Any]:
        self._sent += 1
        for peer, rows in zip(self._peers[1:], shares[1:], strict=True):
            peer.take.remote(self._sent, packed(rows, self._media))
        return [self._sent] * len(shares)

    def take(self, ticket: int, table: Table) -> None:
        """On another rank: what rank 0 sent. Any thread."""
        with self._news:
            self._came[ticket] = table
            self._news.notify_all()

    @contextmanager
    def receive(self, ticket: int) -> Iterator[Sequence[Row]]:
        with self._news:
            if not self._news.wait_for(lambda: ticket in self._came, self._patience_s):
                raise RelaxError(f"trainer: rows that rank 0 sent did not come within {self._patience_s:g} s")
            table = self._came.pop(ticket)
        with opened(table, self._media) as rows:
            yield rows


# --- a plan on its way ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sent:
    """A cut, or the end of the plan, and who waits until it is trained."""

    table: Table | None
    last: bool
    trained: asyncio.Future[None]


class Intake:
    """The plan of a step, as it comes in numbered cuts; the calls may overtake each other."""

    def __init__(self, media: SharedMedia) -> None:
        self._media = media
        self._cuts: dict[int, _Sent] = {}
        self._news = asyncio.Event()
        self._over: str | None = None

    async def put(self, number: int, table: Table | None, last: bool) -> None:
        """Returns when the cut is trained, or when nothing is trained any more. ``table`` None: the plan's end."""
        if self._over is not None:
            return
        sent = self._cuts[number] = _Sent(table, last, asyncio.get_running_loop().create_future())
        self._news.set()
        await sent.trained

    def close(self, why: str) -> None:
        """The step is over, or shall be."""
        self._over = self._over or why
        self._news.set()
        for sent in self._cuts.values():
            sent.trained.set_result(None)
        self._cuts.clear()

    async def plan(self) -> AsyncGenerator[Cut, None]:
        """Raises RelaxError when it was closed before its end."""
        number = 0
        while True:
            while self._over is None and number not in self._cuts:
                self._news.clear()
                await self._news.wait()
            if self._over is not None:
                raise RelaxError(f"trainer: {self._over}")
            sent = self._cuts[number]
            if sent.table is None:
                return
            with opened(sent.table, self._media) as rows:
                yield Cut(rows, sent.last)
            if self._cuts.pop(number, None) is not None:
                sent.trained.set_result(None)
            number += 1
