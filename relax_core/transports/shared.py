"""Weights for other processes of this machine, through shared memory."""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, cast

from relax_core.errors import WeightsError
from relax_core.interfaces import Transport
from relax_core.page_lock import page_free, page_lock
from relax_core.transports.snapshot import Flat, Named, Placed, Publisher, TransportConfig, copied, described
from relax_core.types import Version
from relax_core.weights import Handle, Links, WeightUpdate, offsets, short

if TYPE_CHECKING:
    from torch import Tensor

_MAPPED = 4
"""Pieces of shared memory that a receiver keeps mapped: of two publications, and of two bases."""


class SharedTransport(Transport):
    """To engines in other processes of this machine, through shared memory in the main memory.

    The publisher owns the memory: receivers map it for reading and may die at any time. It is freed by ``close``, and
    at the latest when the publisher ends, even by SIGKILL.
    """

    class Config(TransportConfig):
        """Settings of the transport ``shared``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._segments: list[SharedMemory] = []
        self._bases: list[SharedMemory] = []
        self._publisher = Publisher(self._place, self._drop, config.checksums)
        # For a publisher that ends without close; what a killed one leaves, SharedMemory's tracker process frees.
        self._finalizers = [weakref.finalize(self, _free, s, os.getpid()) for s in (self._segments, self._bases)]

    def publish(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        return self._publisher.publish(version, weights, frozen)

    def _place(self, named: Named, stays: bool) -> Placed:
        infos = described(named)
        size = offsets(infos)[-1]
        segments = self._bases if stays else self._segments
        segment = segments.pop(0) if not stays and len(segments) == 2 else None
        if segment is not None and segment.size < size:
            _free([segment], os.getpid())
            segment = None
        segment = segment or SharedMemory(create=True, size=max(size, 1))
        segments.append(segment)
        assert segment.buf is not None
        buffer = _tensor(segment.buf, size)
        if named and named[0][1].is_cuda:
            page_lock(buffer)
        return Flat(buffer, infos).fill(named, self.config.checksums), _Shared(segment.name)

    def _drop(self, handle: Handle) -> None:
        name = cast(_Shared, handle).name
        gone = [segment for segment in self._bases if segment.name == name]
        self._bases[:] = [segment for segment in self._bases if segment.name != name]
        _free(gone, os.getpid())

    def close(self) -> None:
        self._publisher.clear()
        _free(self._segments, os.getpid())
        _free(self._bases, os.getpid())


@dataclass(frozen=True, slots=True)
class _Shared:
    """A named piece of shared memory."""

    name: str

    @property
    def device(self) -> str:
        return "cpu"

    def fill(self, out: Tensor, start: int, links: Links) -> Iterator[int]:
        if out.is_cuda:
            yield from self._to_gpu(out, start, links)
            return
        mapped = links.pop(self.name, None) or self._mapped()
        links[self.name] = mapped  # the last used comes last
        for old in [key for key, link in links.items() if isinstance(link, mmap.mmap)][:-_MAPPED]:
            links.pop(old).close()
        if start + out.numel() > len(mapped):
            raise short(len(mapped), start + out.numel())
        yield from copied(out, _tensor(memoryview(mapped), len(mapped)), start)

    def _to_gpu(self, out: Tensor, start: int, links: Links) -> Iterator[int]:
        """Page-locked, for which the mapping must be the publisher's very pages: it is read all the same."""
        key = f"{self.name} for a GPU"
        locked = links.pop(key, None) or _Locked(self.name, self._opened(os.O_RDWR))
        links[key] = locked
        for old in [other for other, link in links.items() if isinstance(link, _Locked)][:-_MAPPED]:
            links.pop(old).close()
        yield from copied(out, locked.tensor, start)

    def _mapped(self) -> mmap.mmap:
        """Map a publisher's shared memory.

        Not by ``SharedMemory(name)``: before Python 3.13 that makes the receiver's resource tracker free the memory
        when the receiver ends. The mapping is private (copy on write): nothing a receiver does can alter the
        publisher's.
        """
        opened = self._opened(os.O_RDONLY)
        try:
            return mmap.mmap(opened, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(opened)

    def _opened(self, how: int) -> int:
        try:
            found: int = importlib.import_module("_posixshmem").shm_open(f"/{self.name.lstrip('/')}", how, 0o600)
        except OSError as error:
            raise WeightsError(
                f"weights: the publisher's shared memory {self.name} cannot be opened ({error.strerror}): closed, or "
                "its process ended; publish the weights again"
            ) from error
        return found


class _Locked:
    """A receiver's mapping that a GPU reads directly."""

    def __init__(self, name: str, opened: int) -> None:
        try:
            self._mapped = mmap.mmap(opened, 0)
        finally:
            os.close(opened)
        self.tensor = _tensor(memoryview(self._mapped), len(self._mapped))
        page_lock(self.tensor)

    def close(self) -> None:
        page_free(self.tensor)
        del self.tensor
        self._mapped.close()


def _tensor(memory: memoryview, size: int) -> Tensor:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8, count=size) if size > 0 else torch.empty(0, dtype=torch.uint8)


def _free(segments: list[SharedMemory], owner: int) -> None:
    """Free the publisher's memory, unless this is a forked child of the publisher."""
    if os.getpid() != owner:
        return
    while segments:
        segment = segments.pop()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized() and segment.buf:
            page_free(_tensor(segment.buf, segment.size))
        try:
            segment.close()
        except BufferError:  # a tensor still looks at it; the mapping goes with that tensor
            pass
        finally:
            segment.unlink()
