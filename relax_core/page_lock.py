"""Page-locked main memory, which a GPU reads and writes directly, as fast as its bus is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def page_lock(memory: Tensor) -> bool:
    """Let the GPU copy to and from memory of this process directly; whether that is so. It costs time once.

    By hand: torch's allocator of locked memory rounds up to a power of two, up to twice the size.
    """
    return memory.is_pinned() or int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def page_free(memory: Tensor) -> None:
    """What was locked must be freed before it is unmapped."""
    import torch

    if memory.is_pinned():
        torch.cuda.synchronize()
        _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:
    import torch

    library: Any = torch.cuda
    return library.cudart()
