"""Every built-in reward passes the checks, and planted faults of each kind are found."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from relax_core.errors import DataError
from relax_core.interfaces import Reward
from relax_core.plugins import activate
from relax_core.testing import check_reward
from relax_core.testing.reward_checks import Example
from relax_core.testing.reward_plays import played
from relax_core.types import Group, Trajectory

ADD = "a, b = map(int, input().split())\nprint(a + b)"
TESTS = [{"input": "1 2", "output": "3"}]
BOX = [0.0, 0.0, 10.0, 10.0]
BUILT_IN: dict[str, tuple[Mapping[str, Any], Sequence[Example]]] = {
    "exact": ({}, [(played("cat", answer="cat"), 1.0), (played("dog", answer="cat"), 0.0)]),
    "number": ({}, [(played("it is 7", answer="7"), 1.0), (played("8", answer=7), 0.0)]),
    "choice": ({}, [(played("B", answer="B"), 1.0), (played("A", answer="B"), 0.0)]),
    "math": ({}, [(played("\\boxed{1/2}", answer="0.5"), 1.0), (played("\\boxed{2}", answer="1"), 0.0)]),
    "gsm8k": ({}, [(played("#### 12", answer="12"), 1.0), (played("#### 1", answer="12"), 0.0)]),
    "f1": ({}, [(played("a red cat", answer="a red cat"), 1.0), (played("dog", answer="cat"), 0.0)]),
    "iou": ({}, [(played("[0, 0, 10, 10]", answer=BOX), 1.0), (played("[20, 20, 30, 30]", answer=BOX), 0.0)]),
    "format": ({"words": 1}, [(played("cat"), 1.0), (played("two words"), 0.0)]),
    "length": ({"max": 4, "buffer": 2}, [(played("cat", tokens=4), 0.0), (played("cat", tokens=5), -0.5)]),
    "repetition": ({}, []),
    "code": ({}, [(played(f"```python\n{ADD}\n```", answer=TESTS), 1.0), (played("no", answer=TESTS), 0.0)]),
    "function": ({"call": f"{__file__}:as_long"}, [(played("four", answer="word"), 1.0), (played(""), None)]),
}


def as_long(response: str, answer: str | None) -> float | None:
    """For the reward ``function``."""
    return None if answer is None else float(len(response) == len(answer))


def built(id: str, settings: Mapping[str, Any]) -> Reward:
    stack = activate([])
    reward: Reward = stack.load("rewards", id)(stack.settings("rewards", id, settings, id))
    return reward


@pytest.mark.parametrize("id", BUILT_IN)
def test_the_built_in_ones(id: str) -> None:
    settings, examples = BUILT_IN[id]
    check_reward(built(id, settings), examples)


# --- planted faults ---------------------------------------------------------------------------------------------------


class Good(Reward):
    """1 for the answer, 0 for anything else; it abstains where there is none."""

    async def __call__(self, trajectory: Trajectory) -> Any:
        if trajectory.task.answer is None:
            return None
        return float(trajectory.last_reply == trajectory.task.answer)


EXAMPLES: list[Example] = [
    (played("cat", answer="cat"), 1.0),
    (played("dog", answer="cat"), 0.0),
    (played("cat"), None),
]


def test_a_good_one() -> None:
    check_reward(Good(None), EXAMPLES)
    check_reward(Good(None))


class Components(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return {"right": await super().__call__(trajectory), "short": 0.5}


def test_a_good_mapping() -> None:
    check_reward(Components(None), [(played("cat", answer="cat"), {"right": 1.0, "short": 0.5})])
    check_reward(Components(None), [(played("cat", answer="cat"), 1.5)])
    with pytest.raises(AssertionError, match="should be"):
        check_reward(Components(None), [(played("cat", answer="cat"), {"right": 1.0})])


class Wrong(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return 0.0


class ZeroForAbstaining(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return float(trajectory.last_reply == trajectory.task.answer)


class Word(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return "good"


class Infinite(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return float("inf")


class OddName(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return {1: 1.0}


class Nested(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return {"a": {"b": 1.0}}


class NeedsATurn(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return float(len(trajectory.turns[-1].reply.text))


class NeedsAnAnswer(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return float(trajectory.task.answer.lower() == trajectory.last_reply)


class NeedsReadableTasks(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        if trajectory.task.answer is None:
            raise DataError("the task has no answer")
        return 1.0


def test_a_task_that_cannot_be_scored_may_be_an_error_of_the_data() -> None:
    check_reward(NeedsReadableTasks(None))


class NeedsText(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        return float(ord(trajectory.last_reply.strip()[0]) if trajectory.turns else 0)


class Recursive(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        def depth(text: str) -> int:
            return 1 + depth(text[1:]) if text else 0

        return float(depth(trajectory.last_reply))


class Changes(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        trajectory.turns.clear()
        return 1.0


class Counts(Good):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls = itertools.count()

    async def __call__(self, trajectory: Trajectory) -> Any:
        return float(next(self.calls))


class SharedState(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        self.reply = trajectory.last_reply
        await asyncio.sleep(0)
        return float(len(self.reply))


class Hangs(Good):
    async def __call__(self, trajectory: Trajectory) -> Any:
        await asyncio.Event().wait()


class ClosesOnce(Good):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class FewerOfAGroup(Good):
    async def score_group(self, group: Group) -> Any:
        return [1.0] * max(1, len(group.trajectories) - 1)


class RaisesInAGroup(Good):
    async def score_group(self, group: Group) -> Any:
        return [1.0, *(ValueError("no") for _ in group.trajectories[1:])]


class OddInAGroup(Good):
    async def score_group(self, group: Group) -> Any:
        return ["best"] * len(group.trajectories)


FAULTS: dict[type[Good], str] = {
    Wrong: "examples[0]: found 0.0, should be 1.0",
    ZeroForAbstaining: "examples[2]: found 0.0, should be None",
    Word: "'good' is not a number",
    Infinite: "the value inf",
    OddName: "a component is called 1",
    Nested: "a mapping in a mapping",
    NeedsATurn: "a play without turns: raises IndexError",
    NeedsAnAnswer: "a task without an answer: raises AttributeError",
    NeedsText: "an empty reply: raises IndexError",
    Recursive: "a huge reply: raises RecursionError",
    Changes: "the reward changed the play",
    Counts: "a function of the play alone",
    SharedState: "scored beside others",
    Hangs: "never comes",
    ClosesOnce: "close() called a second time raises RuntimeError: closed already",
    FewerOfAGroup: "score_group gives",
    RaisesInAGroup: "score_group: play 1 raises ValueError: no",
    OddInAGroup: "score_group: play 0: the value 'best' is not a number",
}


@pytest.mark.parametrize("cls", FAULTS, ids=lambda cls: cls.__name__)
def test_faults(cls: type[Good]) -> None:
    examples = EXAMPLES if cls in (Wrong, ZeroForAbstaining) else []
    with pytest.raises(AssertionError) as caught:
        check_reward(cls(None), examples, seconds=1.0)
    assert FAULTS[cls] in str(caught.value) and "\n" not in str(caught.value), caught.value
