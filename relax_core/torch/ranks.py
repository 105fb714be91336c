"""The ranks of a trainer: processes that train one model together, over torch.distributed.

Everything here blocks. What all ranks call together must be called in the same order on each of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.errors import RelaxError

_PATIENCE = timedelta(days=30)
"""Of waiting for rank 0's next order: a rollout may take any time, and a dead rank 0 is noticed by its connection."""


class CommonError(Exception):
    """An error that every rank knows of. ``error``: what to raise for it here."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class LostRanksError(RelaxError):
    """Another rank is dead, or stayed away too long."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among ``size``; ``join`` makes one, ``ALONE`` is that of a trainer of one process.

    Tensors on a GPU travel by NCCL, all else by gloo. A rank that dies or stays away longer than the group's timeout is
    a RelaxError in the others.
    """

    rank: int = 0
    size: int = 1
    orders: Any = None
    """The gloo group by which rank 0 says what is next."""

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    # --- python objects -----------------------------------------------------------------------------------------------

    def hand_out(self, values: Sequence[Any] | None = None) -> Any:
        """This rank's own of rank 0's ``values``, one for each rank; others give none, and wait as long as it takes."""
        if self.alone:
            return values[0] if values else None
        own: list[Any] = [None]
        with self._together("take rank 0's next order"):
            dist.scatter_object_list(own, list(values) if values is not None else None, src=0, group=self.orders)
        return own[0]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value."""
        if self.alone:
            return value
        own = [value]
        with self._together("share an object"):
            dist.broadcast_object_list(own, src=0, device=torch.device("cpu"))
        return own[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with self._together("exchange objects"):
            dist.all_gather_object(found, value)
        return found

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on rank 0; nothing elsewhere."""
        if self.alone:
            return [value]
        found: list[Any] | None = [None] * self.size if self.first else None
        with self._together("collect objects"):
            dist.gather_object(value, found, dst=0)
        return found or []

    # --- numbers ------------------------------------------------------------------------------------------------------

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over ranks, in float64."""
        if self.alone or not values:
            return list(values)
        total: list[float] = self.sum_(torch.tensor(values, dtype=torch.float64)).tolist()
        return total

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks in place; every rank gets the same bits."""
        if not self.alone:
            with self._together("sum over ranks"):
                dist.all_reduce(tensor)
        return tensor

    def spread_(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with rank 0's, in place."""
        if not self.alone:
            with self._together("take rank 0's numbers"):
                dist.broadcast(tensor, src=0)
        return tensor

    def firsts(self, value: float) -> float:
        """Rank 0's number."""
        return value if self.alone else float(self.spread_(torch.tensor(value, dtype=torch.float64)))

    # --- errors -------------------------------------------------------------------------------------------------------

    def agree(self, error: Exception | None, failed: bool | None = None) -> None:
        """Raise CommonError on every rank if one brings an error. ``failed``: whether one does, where that is known."""
        if self.alone:
            if error is not None:
                raise error
            return
        if failed is None:
            failed = self.sum([float(error is not None)])[0] > 0
        if not failed:
            return
        found = self.gather(None if error is None else portable(error, self.rank))
        raise CommonError(error or next(e for e in found if e is not None))

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise LostRanksError(
                f"trainer: rank {self.rank} of {self.size} could not {what}: {said}; another rank died or stayed away: "
                "build the ranks anew and go on from the newest checkpoint"
            ) from error


ALONE = Ranks()


def join(rank: int, size: int, address: str, device: str = "cpu", timeout: float = 600.0) -> Ranks:
    """Meet the other ranks at ``address`` (``tcp://host:port``, which rank 0 opens). One group at a time a process.

    ``device``: ``cpu`` or ``cuda``. ``timeout``: seconds that one rank waits for another. Raises RelaxError if they do
    not all come.
    """
    if size == 1:
        return ALONE
    if not 0 <= rank < size:
        raise RelaxError(f"trainer: found rank {rank} of {size} ranks; ranks count from 0")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=address,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        return Ranks(rank, size, dist.new_group(backend="gloo", timeout=_PATIENCE))
    except (RuntimeError, ValueError) as error:
        leave()
        said = " ".join(str(error).split())[:200]
        raise RelaxError(f"trainer: rank {rank} could not meet the {size} ranks at {address}: {said}") from error


def leave() -> None:
    """End the group of this process, if it is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def portable(error: Exception, rank: int) -> Exception:
    """The error if another process can build it, else a RelaxError that says the same."""
    if isinstance(error, RelaxError):
        try:
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                return error
        except Exception:  # an error of a plugin may need more than its text
            pass
    return RelaxError(f"trainer rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
