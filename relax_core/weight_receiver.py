"""The side that takes weights again and again: into memory that it keeps, and each base once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from relax_core.weights import Links, WeightUpdate, offsets, received, unlink

if TYPE_CHECKING:
    from torch import Tensor


class Receiver:
    """Receives updates for one model.

    ``group``: it may be a member of a publisher's group. Then it must take every publication, at the time of the
    others. The memory is the processor's or, with ``device``, a GPU's.
    """

    def __init__(self, group: bool = False, device: str = "cpu") -> None:
        self.held: str | None = None
        """The id of the base whose tensors the model has."""
        self.frozen: frozenset[str] = frozenset()
        """Their names."""
        self._links: Links = {"group": True} if group else {}
        self._group, self._device = group, device
        self._spare: Tensor | None = None
        self._last: Tensor | None = None

    def receive(self, update: WeightUpdate) -> list[tuple[str, Tensor]]:
        """Every tensor that the model lacks, verified. They lie in memory that the next but one ``receive`` after
        ``took``, and the next one without it, writes over. Raises WeightsError.
        """
        import torch

        found: list[tuple[str, Tensor]] = []
        if update.base is not None and update.base.id != self.held:
            infos, handle = update.base.tensors, update.base.handle
            out = torch.empty(offsets(infos)[-1], dtype=torch.uint8, device=self._device)
            found += received(infos, handle, out, 0, self._links)
        infos, handle = update.moving, update.handle
        out = self.memory(offsets(infos)[-1])
        return found + received(infos, handle, out, 0, self._links)

    def kept(self, update: WeightUpdate) -> frozenset[str]:
        """Names that ``receive`` leaves out, because the model has their bits."""
        return update.frozen if update.base is not None and update.base.id == self.held else frozenset()

    def took(self, update: WeightUpdate, adopted: bool) -> None:
        """The model has what ``receive`` gave: as copies, or (``adopted``) as these very tensors."""
        self.held = update.base.id if update.base is not None else None
        self.frozen = update.frozen
        if adopted and self._device == "cpu":
            self._last, self._spare = self._spare, self._last
        elif self._device != "cpu":
            self._spare = None  # a GPU's allocator is quick, and its memory is short

    def release(self) -> None:
        """Give the memory back; the model keeps what it adopted."""
        self._last = self._spare = None

    def close(self) -> None:
        """Leave the group, close connections, and forget which base the model has."""
        self.release()
        self.held, self.frozen = None, frozenset()
        self.disconnect()

    def disconnect(self) -> None:
        """Leave the group and close connections; the next update makes new ones."""
        with contextlib.suppress(OSError):
            unlink(self._links)
        if self._group:
            self._links["group"] = True

    def memory(self, size: int) -> Tensor:
        """Bytes for the next ``receive``. Fresh pages cost more than the copy into them: they are used again."""
        import torch

        if self._spare is None or self._spare.numel() != size:
            self._spare = None
            self._spare = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._spare
