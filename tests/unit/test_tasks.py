"""The stream of training tasks: a function of position, mixed by weight, shuffled by epoch, never held out ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pytest

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.tasks import TaskStream
from relax_core.types import Task, content_hash, user


class Counting(Environment):
    """``size`` tasks."""

    def __init__(self, size: int) -> None:
        super().__init__(ComponentConfig())
        self.size = size

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return [Task(str(i), (user(f"task {i}"),)) for i in range(self.size)]


def stream(seed: int = 0, **environments: tuple[int, float]) -> TaskStream:
    return TaskStream({name: (Counting(size), weight) for name, (size, weight) in environments.items()}, seed)


def names(found: TaskStream, count: int) -> list[str]:
    return [found[i].environment for i in range(count)]


def test_any_order_of_asking_gives_the_same() -> None:
    one, other = stream(a=(5, 1.0), b=(7, 2.0)), stream(a=(5, 1.0), b=(7, 2.0))
    forwards = [one[i].id for i in range(60)]
    assert [other[i].id for i in reversed(range(60))] == forwards[::-1]


def test_environments_take_turns_by_weight() -> None:
    found = stream(a=(5, 1.0), b=(5, 3.0))
    for start in range(0, 40, 4):
        assert Counter(names(found, 40)[start : start + 4]) == {"a": 1, "b": 3}
    assert names(stream(a=(5, 1.0), b=(5, 1.0)), 4) == ["a", "b", "a", "b"]


def test_an_epoch_has_every_task_once_and_ids_never_repeat() -> None:
    found = stream(a=(10, 1.0))
    epochs = [[found[i] for i in range(start, start + 10)] for start in (0, 10, 20)]
    for epoch in epochs:
        assert {task.messages[0].text for task in epoch} == {f"task {i}" for i in range(10)}
    orders = [[task.messages[0].text for task in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]
    assert len({task.id for epoch in epochs for task in epoch}) == 30


def test_the_seed_decides_the_order() -> None:
    assert [stream(0, a=(10, 1.0))[i].id for i in range(10)] != [stream(1, a=(10, 1.0))[i].id for i in range(10)]


def test_held_out_content_is_an_error() -> None:
    found = stream(a=(10, 1.0))
    found.forbid({content_hash(Task("any id", (user("task 3"),)))}, "held-out")
    with pytest.raises(DataError, match=r"environments\.a: training task '3' is also in evaluation 'held-out'"):
        [found[i] for i in range(10)]


def test_no_task_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no training task"):
        stream(a=(0, 1.0))
