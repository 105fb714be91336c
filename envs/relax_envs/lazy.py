"""Sequences of tasks that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from relax_core.types import Task


class LazyTasks(Sequence[Task]):
    """``make(index)`` gives a task; with ``keep`` each is made once and stays."""

    def __init__(self, size: int, make: Callable[[int], Task], keep: bool) -> None:
        self._size, self._make = size, make
        self._kept: dict[int, Task] | None = {} if keep else None

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        place = range(self._size)[index]  # negative ones too; IndexError beyond the end
        if self._kept is None:
            return self._make(place)
        if place not in self._kept:
            self._kept[place] = self._make(place)
        return self._kept[place]
