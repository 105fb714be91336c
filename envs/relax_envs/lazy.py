"""Sequences of tasks that are made by a function when they are asked for."""

from __future__ import annotations

from collections.abc import Callable

from relax_core.tasks import TaskSequence
from relax_core.types import Task


class LazyTasks(TaskSequence):
    """``function(index)`` gives a task; with ``keep`` each is made once and stays."""

    def __init__(self, size: int, function: Callable[[int], Task], keep: bool) -> None:
        self._size, self._function = size, function
        self._kept: dict[int, Task] | None = {} if keep else None

    def __len__(self) -> int:
        return self._size

    def make(self, place: int) -> Task:
        if self._kept is None:
            return self._function(place)
        if place not in self._kept:
            self._kept[place] = self._function(place)
        return self._kept[place]
