"""How published weights travel on one machine: copied within a process, or through shared memory to others.

Both are double-buffered: a publication stays readable while the next one is written, and is written over by the one
after that, which its checksums then show. Receivers always get copies of their own: nobody ever holds an alias.
"""

from __future__ import annotations

import importlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING

from relax_core.errors import WeightsError
from relax_core.interfaces import ComponentConfig, Transport
from relax_core.types import Version
from relax_core.weights import Manifest, TensorInfo, WeightUpdate, checksums, dtype_name, offsets, view

if TYPE_CHECKING:
    from torch import Tensor


class CopyTransport(Transport):
    """To engines of the same process. The buffers lie on the device of the first tensor."""

    class Config(ComponentConfig):
        """The transport ``copy`` has no settings."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._buffers: list[Tensor] = []

    def publish(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> WeightUpdate:
        import torch

        named = list(weights)
        infos, size = _described(named)
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        device = named[0][1].device if named else torch.device("cpu")
        if buffer is None or buffer.numel() != size or buffer.device != device:
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._buffers.append(buffer)
        return WeightUpdate(_fill(buffer, version, named, infos), _Held(buffer))

    def subscribe(self) -> Callable[[WeightUpdate], Iterator[tuple[str, Tensor]]]:
        return WeightUpdate.tensors

    def close(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True, slots=True)
class _Held:
    """A buffer of this process."""

    buffer: Tensor

    def read(self, start: int, stop: int) -> Tensor:
        return self.buffer[start:stop].clone()


class SharedTransport(Transport):
    """To engines in other processes of this machine, through shared memory in the main memory.

    The publisher owns the memory: receivers map it for reading and may die at any time. It is freed by ``close``, and
    at the latest when the publisher ends, even by SIGKILL.
    """

    class Config(ComponentConfig):
        """The transport ``shared`` has no settings."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._segments: list[SharedMemory] = []
        # For a publisher that ends without close; what a killed one leaves, SharedMemory's tracker process frees.
        self._finalizer = weakref.finalize(self, _free, self._segments, os.getpid())

    def publish(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> WeightUpdate:
        named = list(weights)
        infos, size = _described(named)
        segment = self._segments.pop(0) if len(self._segments) == 2 else None
        if segment is not None and segment.size < size:
            _free([segment], os.getpid())
            segment = None
        segment = segment or SharedMemory(create=True, size=max(size, 1))
        self._segments.append(segment)
        assert segment.buf is not None
        manifest = _fill(_tensor(segment.buf, size), version, named, infos)
        return WeightUpdate(manifest, _Shared(segment.name))

    def subscribe(self) -> Callable[[WeightUpdate], Iterator[tuple[str, Tensor]]]:
        return WeightUpdate.tensors

    def close(self) -> None:
        _free(self._segments, os.getpid())


@dataclass(frozen=True, slots=True)
class _Shared:
    """A named piece of shared memory."""

    name: str

    def read(self, start: int, stop: int) -> Tensor:
        try:
            mapped = _mapped(self.name)
        except OSError as error:
            raise WeightsError(
                f"weights: the publisher's shared memory {self.name} cannot be opened ({error.strerror}): closed, or "
                "its process ended; publish the weights again"
            ) from error
        try:
            return _tensor(memoryview(mapped)[start:stop], min(stop, len(mapped)) - start).clone()
        finally:
            mapped.close()


def _described(named: list[tuple[str, Tensor]]) -> tuple[list[TensorInfo], int]:
    """The tensors without checksums yet, and the size of a buffer for them."""
    infos = [TensorInfo(name, tuple(tensor.shape), dtype_name(tensor), 0) for name, tensor in named]
    return infos, offsets(infos)[-1]


def _fill(buffer: Tensor, version: Version, named: list[tuple[str, Tensor]], infos: list[TensorInfo]) -> Manifest:
    """Copy the tensors into the buffer (uint8), and say what it then holds."""
    import torch

    starts = offsets(infos)
    with torch.no_grad():
        for (_, tensor), info, start, end in zip(named, infos, starts, starts[1:], strict=False):
            buffer[start + info.nbytes : end] = 0
            view(buffer, start, info.shape, info.dtype).copy_(tensor)
    found = checksums(buffer[: starts[-1]], starts)
    summed = (TensorInfo(i.name, i.shape, i.dtype, c) for i, c in zip(infos, found, strict=True))
    return Manifest(version, tuple(summed))


def _tensor(memory: memoryview, size: int) -> Tensor:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8, count=size) if size > 0 else torch.empty(0, dtype=torch.uint8)


def _mapped(name: str) -> mmap.mmap:
    """Map a publisher's shared memory.

    Not by ``SharedMemory(name)``: before Python 3.13 that makes the receiver's resource tracker free the memory when
    the receiver ends. The mapping is private (copy on write): nothing a receiver does can alter the publisher's.
    """
    descriptor = importlib.import_module("_posixshmem").shm_open(f"/{name.lstrip('/')}", os.O_RDONLY, 0o600)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _free(segments: list[SharedMemory], owner: int) -> None:
    """Free the publisher's memory, unless this is a forked child of the publisher."""
    if os.getpid() != owner:
        return
    while segments:
        segment = segments.pop()
        try:
            segment.close()
        except BufferError:  # a tensor still looks at it; the mapping goes with that tensor
            pass
        finally:
            segment.unlink()
