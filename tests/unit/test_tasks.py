"""The order of training tasks: a function of position, mixed by weight, shuffled by epoch, bad rows passed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.tasks import Mixture, Ordered, Scanned, TaskStream
from relax_core.types import Task, user


def numbered(size: int, name: str = "") -> list[Task]:
    return [Task(f"{name}{i}", (user(f"task {i}"),)) for i in range(size)]


class Given(Environment):
    """The tasks that it is given."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__(ComponentConfig())
        self.given = tasks

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return self.given


def stream(seed: int = 0, **environments: tuple[int | Sequence[Task], float]) -> TaskStream:
    return TaskStream(
        {n: (Given(numbered(t) if isinstance(t, int) else t), w) for n, (t, w) in environments.items()}, seed
    )


def at(found: TaskStream, position: int) -> Task:
    return found.task(found.known(*found.place(position)))


def names(found: TaskStream, count: int) -> list[str]:
    return [at(found, i).environment for i in range(count)]


def test_any_order_of_asking_gives_the_same() -> None:
    one, other = stream(a=(5, 1.0), b=(7, 2.0)), stream(a=(5, 1.0), b=(7, 2.0))
    forwards = [at(one, i).id for i in range(60)]
    assert [at(other, i).id for i in reversed(range(60))] == forwards[::-1]


def test_environments_take_turns_by_weight() -> None:
    found = stream(a=(5, 1.0), b=(5, 3.0))
    for start in range(0, 40, 4):
        assert Counter(names(found, 40)[start : start + 4]) == {"a": 1, "b": 3}
    assert names(stream(a=(5, 1.0), b=(5, 1.0)), 4) == ["a", "b", "a", "b"]


def test_an_epoch_has_every_task_once_and_ids_never_repeat() -> None:
    found = stream(a=(10, 1.0))
    epochs = [[at(found, i) for i in range(start, start + 10)] for start in (0, 10, 20)]
    for epoch in epochs:
        assert {task.messages[0].text for task in epoch} == {f"task {i}" for i in range(10)}
    orders = [[task.messages[0].text for task in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]
    assert len({task.id for epoch in epochs for task in epoch}) == 30


def test_the_seed_decides_the_order() -> None:
    one, other = stream(0, a=(10, 1.0)), stream(1, a=(10, 1.0))
    assert [at(one, i).id for i in range(10)] != [at(other, i).id for i in range(10)]


def test_no_task_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no training task"):
        stream(a=(0, 1.0))


# --- mixtures ---------------------------------------------------------------------------------------------------------


def test_a_mixture_is_one_sequence() -> None:
    mixed = Mixture({"x": (numbered(2, "x"), 1.0), "y": (numbered(3, "y"), 5.0)})
    assert [task.id for task in mixed] == ["x0", "x1", "y0", "y1", "y2"]
    assert mixed[-1].id == "y2" and [t.id for t in mixed[1:3]] == ["x1", "y0"]
    with pytest.raises(IndexError):
        mixed[5]


def test_parts_of_a_mixture_share_the_weight_of_their_environment() -> None:
    mixed = Mixture({"x": (numbered(4, "x"), 1.0), "y": (numbered(9, "y"), 3.0), "empty": ([], 7.0)})
    found = stream(a=(mixed, 1.0), b=(3, 1.0))
    tasks = [at(found, i) for i in range(80)]
    assert Counter(task.environment for task in tasks) == {"a": 40, "b": 40}
    assert Counter(task.id[2] for task in tasks if task.environment == "a") == {"x": 10, "y": 30}
    # each part has epochs of its own: nothing comes twice in one
    assert len({task.id for task in tasks}) == 80
    assert sum(task.id.startswith("a/x") and task.id.endswith("#0") for task in tasks) == 4


class Backwards(list[Task]):
    """Chooses its own order, and knows of a bad row."""

    bad_places = (1,)

    def order(self, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.arange(len(self))[::-1]


def test_a_sequence_may_choose_its_order() -> None:
    tasks: Any = Backwards(numbered(4))
    assert all(isinstance(tasks, protocol) for protocol in (Ordered, Scanned))
    found = stream(a=(tasks, 1.0))
    assert [at(found, i).id for i in range(5)] == ["a/3#0", "a/2#0", "a/1#0", "a/0#0", "a/3#1"]
    assert list(Mixture({"x": (numbered(2), 1.0), "y": (tasks, 1.0)}).bad_places) == [3]


# --- bad rows ---------------------------------------------------------------------------------------------------------


def test_rows_after_a_skipped_one_move_up() -> None:
    found = stream(a=(Backwards(numbered(6)), 1.0))
    for number in (4, 0, 1):  # in any order of finding them
        found.skip(found.candidate("a", number))
    assert found.skipped == {"a": [0, 1, 4]}
    assert [at(found, i).id for i in range(4)] == ["a/3#0", "a/2#0", "a/0#0", "a/5#1"]


def test_orders_of_far_epochs_are_not_kept() -> None:
    found = stream(a=(3, 1.0))
    first = [at(found, i).id for i in range(30)]
    assert len(found._orders) <= 3
    assert [at(found, i).id for i in range(30)] == first
