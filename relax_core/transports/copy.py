"""Weights for engines of the same process: copied twice, so that neither side ever sees the other's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.interfaces import Transport
from relax_core.transports.snapshot import Flat, Named, Placed, Publisher, TransportConfig, copied, next_flat
from relax_core.types import Version
from relax_core.weights import Handle, Links, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class CopyTransport(Transport):
    """To engines of the same process. The buffers lie on the device of the first tensor."""

    class Config(TransportConfig):
        """Settings of the transport ``copy``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._flats: list[Flat] = []
        self._publisher = Publisher(self._place, _forget, config.checksums)

    def publish(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        return self._publisher.publish(version, weights, frozen)

    def _place(self, named: Named, stays: bool) -> Placed:
        flat = next_flat([] if stays else self._flats, named)
        return flat.fill(named, self.config.checksums), _Held(flat.buffer)

    def close(self) -> None:
        self._flats.clear()
        self._publisher.clear()


def _forget(handle: Handle) -> None:
    """The last receiver that holds the handle frees the buffer."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A buffer of this process."""

    buffer: Tensor

    @property
    def device(self) -> str:
        return str(self.buffer.device)

    def fill(self, out: Tensor, start: int, links: Links) -> Iterator[int]:
        return copied(out, self.buffer, start)
