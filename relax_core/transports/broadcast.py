"""Weights broadcast to all engines at once: gloo between processors, NCCL between GPUs.

Engines are members of a group. It is formed anew when one joins or has died; whoever is not in it, comes late, or saw
it break, pulls the same publication over TCP. A member's open connection is its sign of life.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from relax_core.interfaces import Transport
from relax_core.transports.group import Group, group_name, new_store
from relax_core.transports.server import Server
from relax_core.transports.snapshot import Flat, Named, Placed, Publisher, TransportConfig, next_flat
from relax_core.transports.tcp import Pull
from relax_core.types import Version
from relax_core.weights import Handle, Links, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store


class BroadcastTransport(Transport):
    """Publishing returns after a copy; a thread of the publisher then broadcasts that copy, bucket by bucket.

    All members must take an update at the same time: load engines together, not one after the other. One that does not
    come within ``timeout_s`` is left behind, and joins again by itself.
    """

    class Config(TransportConfig):
        """Settings of the transport ``broadcast``."""

        host: str = "127.0.0.1"
        """The address on which the publisher listens, and which receivers call: of this machine, or loopback."""
        backend: Literal["auto", "gloo", "nccl"] = "auto"
        """``auto``: nccl for weights on a GPU, gloo otherwise. With nccl every engine needs a GPU of its own."""
        bucket_bytes: int = 1 << 23
        """Of one broadcast by gloo, and a thirty-second of one by nccl; four are on their way at once."""
        timeout_s: float = 30.0
        """How long one bucket may take, the wait for a member included."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._flats: list[Flat] = []
        self._numbers: list[int] = []
        self._jobs: list[threading.Thread] = []
        self._server: Server | None = None
        self._store: tuple[Store, int] | None = None
        self._group: Group | None = None
        self._members: tuple[int, ...] = ()
        self._generation = 0
        self._left_out: set[int] = set()
        self._publisher = Publisher(self._place, self._drop, config.checksums)

    def publish(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        return self._publisher.publish(version, weights, frozen)

    @property
    def members(self) -> int:
        """How many receivers are in the group of the newest publication."""
        return len(self._members)

    @property
    def pulled(self) -> int:
        """Bytes that receivers have pulled over TCP so far."""
        return self._server.sent if self._server else 0

    def wait(self) -> None:
        """Until what was published has been broadcast, or was given up."""
        for job in self._jobs:
            job.join()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self.wait()
        if self._server is not None:
            self._server.close()
        self._server = self._store = self._group = None
        self._members = ()
        for kept in (self._flats, self._numbers, self._jobs):
            kept.clear()
        self._publisher.clear()

    # --- publishing ---------------------------------------------------------------------------------------------------

    def _place(self, named: Named, stays: bool) -> Placed:
        server = self._server = self._server or Server(self.config.host)
        if not stays:
            if len(self._jobs) == 2:
                self._jobs.pop(0).join()  # it still sends the buffer that comes next
            if len(self._numbers) == 2:
                server.withdraw(self._numbers.pop(0))
        flat = next_flat([] if stays else self._flats, named)
        infos = flat.fill(named, self.config.checksums)
        number = server.offer(flat.buffer)
        pull = Pull(server.host, server.port, server.token, number)
        if stays:
            return infos, pull
        self._numbers.append(number)
        return infos, self._begin(server, flat.buffer, pull)

    def _drop(self, handle: Handle) -> None:
        if self._server is not None:
            self._server.withdraw(cast(Pull, handle).number)

    def _begin(self, server: Server, buffer: Tensor, pull: Pull) -> Handle:
        """Broadcast the buffer in a thread; the handle that leads to it."""
        kind = self.config.backend
        backend = ("nccl" if buffer.is_cuda else "gloo") if kind == "auto" else kind
        if self._group is not None and self._group.broken:
            self._left_out.update(self._members)  # they join again under new numbers
        members = tuple(member for member in server.members if member not in self._left_out)
        if members != self._members or (self._group is not None and self._group.broken):
            if self._group is not None:
                self._group.leave()
            self._members, self._group = members, None
        self._store = self._store or new_store(server.host)
        store, port = self._store
        if self._group is None and members:
            self._generation += 1
            self._group = Group(store, self._generation, 0, len(members) + 1, backend, self.config.timeout_s)
        # The host looks after each bucket: a GPU's are done too soon for small ones.
        bucket = self.config.bucket_bytes * (32 if backend == "nccl" else 1)
        group, job = self._group, threading.Thread(target=_nothing)
        if group is not None:
            job = threading.Thread(target=group.broadcast, args=(buffer, bucket), name="weights broadcast", daemon=True)
        self._jobs.append(job)
        job.start()
        timeout = self.config.timeout_s
        return Broadcast(pull, port, self._generation, members, backend, bucket, timeout, buffer.numel())


def _nothing() -> None:
    """Nobody is in the group."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A buffer that is broadcast to the members, and can be pulled by everybody."""

    pull: Pull
    store_port: int
    generation: int
    members: tuple[int, ...]
    backend: str
    bucket: int
    timeout_s: float
    size: int

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def fill(self, out: Tensor, start: int, links: Links) -> Iterator[int]:
        """Receivers that keep ``links`` with a true ``group`` are members from the next publication on."""
        name = group_name(self.pull.host, self.store_port)
        place: Place | None = links.get(name)
        done = 0
        if place is not None and place.member in self.members and start == 0 and out.numel() == self.size:
            group = place.group_of(self)
            for done in group.receive(out, self.bucket):
                yield done
            if not group.broken:
                return
        if place is not None and place.broken:
            links.pop(name).close()
        if links.get("group") and name not in links:
            links[name] = Place(self)
        for pulled in self.pull.fill(out[done:], start + done, links):
            yield done + pulled


class Place:
    """A receiver's place among the members, for as long as it is open."""

    def __init__(self, handle: Broadcast) -> None:
        import socket

        from relax_core.transports.server import Connection

        pull = handle.pull
        self._life = Connection(socket.create_connection((pull.host, pull.port), timeout=30.0), pull.token)
        self.member = self._life.join()
        self._store: Store | None = None
        self._group: Group | None = None

    @property
    def broken(self) -> bool:
        return self._group is not None and self._group.broken

    def group_of(self, handle: Broadcast) -> Group:
        if self._group is None or self._group.generation != handle.generation:
            if self._group is not None:
                self._group.leave()
            self._store = self._store or new_store(handle.pull.host, handle.store_port)[0]
            rank, size = handle.members.index(self.member) + 1, len(handle.members) + 1
            self._group = Group(self._store, handle.generation, rank, size, handle.backend, handle.timeout_s)
        return self._group

    def close(self) -> None:
        self._life.close()
        if self._group is not None:
            self._group.close()
