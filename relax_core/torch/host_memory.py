"""Main memory in which a GPU's tensors wait while somebody else has the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from relax_core.page_lock import page_free, page_lock

Put = Callable[[Tensor], Tensor]
"""Gives a copy of a tensor that lies elsewhere. On a GPU it may be under way until the device is synchronized."""
_ALIGNMENT = 64


class HostMemory:
    """One block, which is kept from one time to the next and, where a GPU is, page-locked.

    A GPU copies into locked pages as fast as its bus is; into a fresh tensor it took 40 times as long. Locking takes
    about as long as one such copy, and happens once. Where pages cannot be locked the block is ordinary memory.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._unlock: Callable[[], object] | None = None

    @property
    def locked(self) -> bool:
        """Whether the block is page-locked."""
        return self._unlock is not None

    def room(self, tensors: Iterable[Tensor]) -> Put:
        """Room for these tensors together. What the function gives lies in it, contiguous, until the next ``room``,
        which writes over it; give it no more bytes than were asked for.
        """
        size = sum(_rounded(tensor) for tensor in tensors)
        if self._block is None or self._block.numel() < size:
            self.release()
            self._block = torch.empty(size, dtype=torch.uint8)
            self._lock(self._block)
        block, at = self._block, 0

        def put(tensor: Tensor) -> Tensor:
            nonlocal at
            target = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            at += _rounded(tensor)
            return target.copy_(tensor.detach(), non_blocking=True)

        return put

    def release(self) -> None:
        """Give the block up; whoever has tensors in it keeps them."""
        if self._unlock is not None:
            self._unlock()
        self._block = self._unlock = None

    def _lock(self, block: Tensor) -> None:
        if not torch.cuda.is_available() or not block.numel():
            return
        block.fill_(0)  # with all threads; locking would fetch page after page
        if page_lock(block):
            # The finalizer holds the block: it must not be freed before it is unlocked.
            self._unlock = unlock = weakref.finalize(self, page_free, block)
            unlock.atexit = False


def held(module: torch.nn.Module) -> tuple[Tensor, ...]:
    """Parameters and buffers, each once."""
    return *module.parameters(), *module.buffers()


def move(module: torch.nn.Module, put: Put) -> None:
    """A module's parameters and buffers to where ``put`` copies them; they stay the same objects."""
    for tensor in held(module):
        tensor.data = put(tensor)


def onto(device: str) -> Put:
    """Onto a GPU, or within main memory."""
    return lambda tensor: tensor.detach().to(device, non_blocking=True)


def settle() -> None:
    """Until copies that are under way have ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rounded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
