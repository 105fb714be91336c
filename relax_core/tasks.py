"""The endless, repeatable stream of training tasks: position -> task, whatever was asked before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.errors import DataError
from relax_core.keys import generator
from relax_core.types import Task, content_hash

if TYPE_CHECKING:
    from relax_core.interfaces import Environment


class TaskStream:
    """Interleaves the environments by weight and shuffles each anew every epoch.

    The i-th task of the run is a function of (seed, i). Environments take turns by weight (the one whose share is
    most behind is next, the first listed on a tie), so every step has the same mix.
    """

    def __init__(self, environments: Mapping[str, tuple[Environment, float]], seed: int) -> None:
        self.seed = seed
        self.names = list(environments)
        self.weights = [weight for _, weight in environments.values()]
        self.tasks: dict[str, Sequence[Task]] = {}
        for name, (environment, _) in environments.items():
            self.tasks[name] = environment.tasks("train")
            if not len(self.tasks[name]):
                raise DataError(f"environments.{name}: the data set has no training task: check its path and split")
        self._turns: list[tuple[int, int]] = []  # position -> (environment, how many of its tasks came before)
        self._counts = [0] * len(self.names)
        self._orders: dict[tuple[str, int], list[int]] = {}
        self._forbidden: dict[str, str] = {}

    def forbid(self, hashes: Collection[str], evaluation: str) -> None:
        """From now on a task with one of these content hashes is an error: it is held out for ``evaluation``."""
        self._forbidden |= dict.fromkeys(hashes, evaluation)

    def __getitem__(self, position: int) -> Task:
        """The task at ``position``; its id names environment, task and epoch, so that draws never repeat.

        Raises DataError when its content is held out for an evaluation.
        """
        while len(self._turns) <= position:
            shares = [(count + 0.5) / weight for count, weight in zip(self._counts, self.weights, strict=True)]
            chosen = shares.index(min(shares))
            self._turns.append((chosen, self._counts[chosen]))
            self._counts[chosen] += 1
        chosen, count = self._turns[position]
        name = self.names[chosen]
        tasks = self.tasks[name]
        epoch, place = divmod(count, len(tasks))
        task = tasks[self._order(name, epoch, len(tasks))[place]]
        if self._forbidden and (held := self._forbidden.get(content_hash(task))):
            raise DataError(
                f"environments.{name}: training task {task.id!r} is also in evaluation {held!r}: "
                "split the data, or set disjoint: false there"
            )
        return replace(task, id=f"{name}/{task.id}#{epoch}", environment=name)

    def _order(self, name: str, epoch: int, size: int) -> list[int]:
        key = (name, epoch)
        if key not in self._orders:
            self._orders[key] = generator(self.seed, "order", name, epoch).permutation(size).tolist()
            self._orders.pop((name, epoch - 2), None)
        return self._orders[key]
