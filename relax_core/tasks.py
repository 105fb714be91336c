"""The endless, repeatable order of training tasks: position -> task, whatever was asked before."""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, overload, runtime_checkable

from relax_core.errors import DataError
from relax_core.keys import generator
from relax_core.types import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.interfaces import Environment


@runtime_checkable
class Ordered(Protocol):
    """A sequence of tasks that chooses its own shuffling, so that neighbours in it are cheap to read."""

    def order(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """A permutation of its indices, for one pass; a function of the generator alone."""


@runtime_checkable
class Scanned(Protocol):
    """A sequence of tasks that knows of bad rows before they are asked for, since it had to look at all of them."""

    @property
    def bad_places(self) -> Collection[int]:
        """Their indices: asking for one raises DataError."""


@runtime_checkable
class Located(Protocol):
    """A sequence of tasks that come from files."""

    def where(self, index: int) -> str:
        """File and line of a row, as ``file:line``."""


def located(tasks: Sequence[Task], index: int, error: DataError) -> DataError:
    """The error of a row with its file and line before it: what reads its media knows only theirs."""
    where = tasks.where(index) if isinstance(tasks, Located) else ""
    return error if not where or str(error).startswith(where) else type(error)(f"{where}: {error}")


class TaskSequence(Sequence[Task]):
    """A sequence of tasks that are made when they are asked for; subclasses say how many there are and make one."""

    @abstractmethod
    def make(self, place: int) -> Task:
        """The task at a place from 0 to the length. Raises DataError for a bad row."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        places = range(len(self))[index]  # negative ones too; IndexError beyond the end
        return [self.make(place) for place in places] if isinstance(places, range) else self.make(places)


class Mixture(TaskSequence):
    """Several sequences of tasks behind each other. Training mixes them by weight and shuffles each by itself.

    ``parts``: name -> (tasks, weight), names such as the paths of data sets.
    """

    def __init__(self, parts: Mapping[str, tuple[Sequence[Task], float]]) -> None:
        self.parts = dict(parts)

    @property
    def bad_places(self) -> Collection[int]:
        """Those of its parts (see ``Scanned``)."""
        found, start = [], 0
        for tasks, _ in self.parts.values():
            if isinstance(tasks, Scanned):
                found += [start + place for place in tasks.bad_places]
            start += len(tasks)
        return found

    def where(self, index: int) -> str:
        """File and line of a row, where its part knows (see ``Located``)."""
        tasks, place = self._find(index)
        return tasks.where(place) if isinstance(tasks, Located) else ""

    def __len__(self) -> int:
        return sum(len(tasks) for tasks, _ in self.parts.values())

    def make(self, place: int) -> Task:
        tasks, inner = self._find(place)
        return tasks[inner]

    def _find(self, place: int) -> tuple[Sequence[Task], int]:
        for tasks, _ in self.parts.values():
            if place < len(tasks):
                return tasks, place
            place -= len(tasks)
        raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row in the order of training: the ``number``-th of its stream, at ``index`` of its tasks in that ``epoch``."""

    stream: str
    number: int
    epoch: int
    index: int


class TaskStream:
    """Interleaves the environments (and the parts of a Mixture) by weight and shuffles each anew every epoch.

    A *stream* is one sequence of tasks. Streams take turns by weight (the one whose share is most behind is next, the
    first listed on a tie), so every step has the same mix. Bad rows are left out, and the next row of the same stream
    moves up: the task at a position is a function of the seed, the position and the data alone.
    """

    def __init__(self, environments: Mapping[str, tuple[Environment, float]], seed: int) -> None:
        self.seed = seed
        self.tasks: dict[str, Sequence[Task]] = {}
        """By stream: an environment's name, or ``environment:part``."""
        self.environments: dict[str, str] = {}
        """The environment of each stream."""
        self.weights: list[float] = []
        for name, (environment, weight) in environments.items():
            found = environment.tasks("train")
            if not len(found):
                raise DataError(f"environments.{name}: the data set has no training task: check its path and split")
            self._add(name, found, weight)
        self.skipped: dict[str, list[int]] = {name: [] for name in self.tasks}
        """By stream: the numbers of the candidates that turned out bad, ascending."""
        self._names = list(self.tasks)
        self._turns: list[tuple[int, int]] = []  # position -> (stream, how many of its tasks came before)
        self._counts = [0] * len(self._names)
        self._orders: dict[tuple[str, int], NDArray[np.int64]] = {}

    def _add(self, environment: str, tasks: Sequence[Task], weight: float) -> None:
        if not isinstance(tasks, Mixture):
            self.tasks[environment], self.environments[environment] = tasks, environment
            self.weights.append(weight)
            return
        filled = {name: part for name, part in tasks.parts.items() if len(part[0])}
        total = sum(share for _, share in filled.values())
        for name, (part, share) in filled.items():
            self.tasks[f"{environment}:{name}"], self.environments[f"{environment}:{name}"] = part, environment
            self.weights.append(weight * share / total)

    def place(self, position: int) -> tuple[str, int]:
        """The stream whose turn it is at ``position``, and how many of its tasks came before."""
        while len(self._turns) <= position:
            shares = [(count + 0.5) / weight for count, weight in zip(self._counts, self.weights, strict=True)]
            chosen = shares.index(min(shares))
            self._turns.append((chosen, self._counts[chosen]))
            self._counts[chosen] += 1
        chosen, before = self._turns[position]
        return self._names[chosen], before

    def candidate(self, stream: str, number: int) -> Candidate:
        """The ``number``-th row of a stream, good or bad."""
        size = len(self.tasks[stream])
        epoch, place = divmod(number, size)
        return Candidate(stream, number, epoch, int(self._order(stream, epoch, size)[place]))

    def known(self, stream: str, before: int) -> Candidate:
        """The good row of a stream with ``before`` good ones before it, as far as bad ones are known by now."""
        number = before
        for bad in self.skipped[stream]:
            number += bad <= number
        return self.candidate(stream, number)

    def skip(self, candidate: Candidate) -> None:
        """The row is bad in this place of the order."""
        insort(self.skipped[candidate.stream], candidate.number)

    def task(self, candidate: Candidate) -> Task:
        """Its task; the id names environment, task and epoch, so that draws never repeat. Raises DataError if bad."""
        environment = self.environments[candidate.stream]
        task = self.tasks[candidate.stream][candidate.index]
        return replace(task, id=f"{environment}/{task.id}#{candidate.epoch}", environment=environment)

    def _order(self, stream: str, epoch: int, size: int) -> NDArray[np.int64]:
        key = (stream, epoch)
        if key not in self._orders:
            rng, tasks = generator(self.seed, "order", stream, epoch), self.tasks[stream]
            self._orders[key] = tasks.order(rng) if isinstance(tasks, Ordered) else rng.permutation(size)
            for old in [k for k in self._orders if k[0] == stream and abs(k[1] - epoch) > 1]:
                del self._orders[old]
        return self._orders[key]
