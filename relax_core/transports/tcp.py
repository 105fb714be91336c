"""Weights pulled over TCP, by byte range: for engines on other machines, outside any group, or late."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from relax_core.errors import WeightsError
from relax_core.interfaces import Transport
from relax_core.transports.server import BIG, Connection, Server
from relax_core.transports.snapshot import Flat, Named, Placed, Publisher, TransportConfig, next_flat
from relax_core.types import Version
from relax_core.weight_sums import BLOCK
from relax_core.weights import Handle, Links, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class TcpTransport(Transport):
    """Receivers pull from a server thread of the publisher, over several connections at once.

    Whoever holds an update may read it: it carries the server's token. The bytes travel unencrypted.
    """

    class Config(TransportConfig):
        """Settings of the transport ``tcp``."""

        host: str = "127.0.0.1"
        """The address on which the publisher listens, and which receivers call: of this machine, or loopback."""
        connections: int = 1
        """Of each receiver. More help where one does not fill the network."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._flats: list[Flat] = []
        self._server: Server | None = None
        self._publisher = Publisher(self._place, self._drop, config.checksums)
        self._readable: list[int] = []

    def publish(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        return self._publisher.publish(version, weights, frozen)

    def _place(self, named: Named, stays: bool) -> Placed:
        server = self._server = self._server or Server(self.config.host)
        if not stays and len(self._readable) == 2:
            server.withdraw(self._readable.pop(0))
        flat = next_flat([] if stays else self._flats, named)
        infos = flat.fill(named, self.config.checksums)
        number = server.offer(flat.buffer)
        if not stays:
            self._readable.append(number)
        return infos, Pull(server.host, server.port, server.token, number, self.config.connections)

    def _drop(self, handle: Handle) -> None:
        if self._server is not None:
            self._server.withdraw(cast(Pull, handle).number)

    @property
    def sent(self) -> int:
        """Bytes that receivers have pulled so far."""
        return self._server.sent if self._server else 0

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None
        self._flats.clear()
        self._readable.clear()
        self._publisher.clear()


@dataclass(frozen=True, slots=True)
class Pull:
    """A buffer behind a server."""

    host: str
    port: int
    token: bytes
    number: int
    connections: int = 1

    @property
    def device(self) -> str:
        return "cpu"

    def fill(self, out: Tensor, start: int, links: Links) -> Iterator[int]:
        import torch

        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=torch.uint8)
        memory = memoryview(cast(bytes, host.numpy()))
        try:
            if self.connections == 1 or len(memory) <= BIG:
                pieces = self._one(memory, start, links)
            else:
                pieces = self._several(memory, start, links)
            if host is out:
                yield from pieces
                return
            for _ in pieces:
                pass
        except (OSError, EOFError) as error:
            self._unlink(links)
            raise WeightsError(
                f"weights: the publisher at {self.host}:{self.port} does not answer ({error or type(error).__name__}): "
                "its process ended, or the network is down; publish the weights again, or take them from a peer"
            ) from error
        except BaseException:
            self._unlink(links)  # what was asked for is still on its way
            raise
        out.copy_(host)
        yield out.numel()

    def _one(self, memory: memoryview, start: int, links: Links) -> Iterator[int]:
        connection = self._connected(links, 0)
        connection.ask(self.number, start, start + len(memory))
        for at in range(0, len(memory), BLOCK):
            stop = min(at + BLOCK, len(memory))
            connection.read(memory[at:stop])
            yield stop
        if not len(memory):
            yield 0

    def _several(self, memory: memoryview, start: int, links: Links) -> Iterator[int]:
        """Each connection brings every n-th piece; what is there without a gap is told."""
        cuts = [(at, min(at + BIG, len(memory))) for at in range(0, len(memory), BIG)]
        there = [threading.Event() for _ in cuts]

        def bring(which: int) -> None:
            try:
                for i in range(which, len(cuts), self.connections):
                    at, stop = cuts[i]
                    connections[which].ask(self.number, start + at, start + stop)
                    connections[which].read(memory[at:stop])
                    there[i].set()
            finally:
                for event in there[which :: self.connections]:
                    event.set()

        connections = [self._connected(links, i) for i in range(self.connections)]
        with ThreadPoolExecutor(self.connections, "weights") as pool:
            work = [pool.submit(bring, i) for i in range(self.connections)]
            for i, (_, stop) in enumerate(cuts):
                there[i].wait()
                done = work[i % self.connections]
                if done.done():
                    done.result()
                yield stop
            for one in work:
                one.result()

    def _connected(self, links: Links, which: int) -> Connection:
        key = f"{self.host}:{self.port}/{which}"
        if key not in links:
            links[key] = Connection(socket.create_connection((self.host, self.port), timeout=30.0), self.token)
        connection: Connection = links[key]
        return connection

    def _unlink(self, links: Links) -> None:
        for key in [key for key in links if key.startswith(f"{self.host}:{self.port}/")]:
            links.pop(key).close()
