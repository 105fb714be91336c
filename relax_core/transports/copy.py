"""Weights for engines of the same process: copied twice, so that neither side ever sees the other's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.interfaces import Transport
from relax_core.transports.snapshot import Named, Placed, Publisher, TransportConfig, copied, described, fill
from relax_core.types import Version
from relax_core.weights import Handle, Links, WeightUpdate, offsets

if TYPE_CHECKING:
    from torch import Tensor


class CopyTransport(Transport):
    """To engines of the same process. The buffers lie on the device of the first tensor."""

    class Config(TransportConfig):
        """Settings of the transport ``copy``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._buffers: list[Tensor] = []
        self._publisher = Publisher(self._place, _forget, config.checksums)

    def publish(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        return self._publisher.publish(version, weights, frozen)

    def _place(self, named: Named, stays: bool) -> Placed:
        buffer = next_buffer([] if stays else self._buffers, named)
        return fill(buffer, named, self.config.checksums), _Held(buffer)

    def close(self) -> None:
        self._buffers.clear()
        self._publisher.clear()


def next_buffer(buffers: list[Tensor], named: Named) -> Tensor:
    """The older of two buffers, or a new one, on the device of the first tensor; it becomes the newest of the list."""
    import torch

    size = offsets(described(named))[-1]
    device = named[0][1].device if named else torch.device("cpu")
    buffer = buffers.pop(0) if len(buffers) == 2 else None
    if buffer is None or buffer.numel() != size or buffer.device != device:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    buffers.append(buffer)
    return buffer


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
