"""Every environment that needs no files passes the checks, and planted faults of each kind are found."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from relax_core.chat import Chat
from relax_core.errors import EngineError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.testing import check_environment, play
from relax_core.types import Image, Message, PlayError, Task, Text, user
from relax_envs.single_turn import SingleTurn
from relax_envs.tools.use import ToolUse
from relax_envs.toy.colour import Colour
from relax_envs.toy.motion import Motion
from relax_envs.toy.tone import Tone
from relax_envs.toy.words import LastWord, NthWord


@pytest.mark.parametrize("cls", [NthWord, LastWord, Colour, Tone, Motion])
def test_the_toys(cls: Any) -> None:
    check_environment(cls(cls.Config()), looked_at=40)


def squared(number: int) -> int:
    """The square of a number."""
    return number**2


def test_rows_of_a_file_asked_once_or_with_tools(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "what is {i} x {i} ?", "answer": "{i * i}"}}\n' for i in range(20)))
    data = {"data": str(rows), "split": {"eval": 0.3}}
    check_environment(SingleTurn(SingleTurn.Config.model_validate_json(json.dumps(data))))
    tools = [{"id": "function", "path": f"{__file__}:squared"}]
    calling = ToolUse(ToolUse.Config.model_validate_json(json.dumps({**data, "tools": tools})))
    call = '<tool_call>{"name": "squared", "arguments": {"number": 7}}</tool_call>'
    check_environment(calling, scripts=[[call * 3, call, "49"]])


class Good(Environment):
    """Several turns, with chance: what the faulty ones below are made of."""

    class Config(ComponentConfig):
        retries: int = 2

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        words = ("cat", "dog", "sun") if split == "train" else ("moon",)
        return [Task(word, (user(f"say {word}"),), word, {"length": len(word)}) for word in words]

    async def play(self, task: Task, chat: Chat) -> None:
        reply = await chat(*task.messages)
        for i in range(self.config.retries):
            if reply.text == task.answer:
                return
            reply = await chat(f"{task.answer} {chat.random('which', i):.6f}")


def test_a_scripted_play() -> None:
    good = Good(Good.Config())
    task = good.tasks("train")[0]
    trajectory = play(good, task, ["hm", "kočka 🐈", "cat"], member=3)
    assert [turn.reply.text for turn in trajectory.turns] == ["hm", "kočka 🐈", "cat"] and trajectory.error is None
    assert play(good, task, ["hm", "cat"], member=2).turns[1].prompt != trajectory.turns[1].prompt
    (sample,) = trajectory.samples
    assert sample.sampled == sum(len(turn.reply.text.encode()) + 1 for turn in trajectory.turns)
    with pytest.raises(EngineError, match="a reply was asked for after all 1 that there are: give more"):
        play(good, task, ["hm"])
    assert play(Raises(Good.Config()), task, ["x"]).error == PlayError(
        "environments.Raises", "ValueError", "invalid literal for int() with base 10: 'x'"
    )
    with pytest.raises(AssertionError, match="play of task 'cat': not over after"):
        play(Waits(Good.Config()), task, ["x"], seconds=0.2)


def test_a_good_one() -> None:
    check_environment(Good(Good.Config()), scripts=[["hm", "cat"]])


# --- tasks ------------------------------------------------------------------------------------------------------------

Change = Callable[[list[Task], str], Any]


class Changed(Good):
    def __init__(self, config: Any, change: Change) -> None:
        super().__init__(config)
        self.change = change

    def tasks(self, split: Literal["train", "eval"]) -> Any:
        return self.change(list(super().tasks(split)), split)


@dataclass(frozen=True)
class Odd:
    """Nothing that JSON knows."""

    word: str = "x"


class Local:
    """Not to be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def shuffled(tasks: list[Task], split: str) -> list[Task]:
    return random.sample(tasks, len(tasks)) if split == "train" else tasks


def thread_bound(tasks: list[Task], split: str) -> list[Task]:
    main = threading.current_thread().name.startswith("MainThread")
    return tasks if main else tasks[::-1]


def of_first(change: Callable[[Task], Any]) -> Change:
    return lambda tasks, split: [change(tasks[0]), *tasks[1:]]


def changed(**fields: Any) -> Change:
    return of_first(lambda task: replace(task, **fields))


Unchecked: Any = Message
UncheckedText: Any = Text
TASKS: dict[str, tuple[Change, str]] = {
    "no sequence": (lambda tasks, split: iter(tasks), "give a sequence"),
    "empty": (lambda tasks, split: [], "is empty"),
    "no task": (of_first(lambda task: task.id), "is a str, not a Task"),
    "no id": (of_first(lambda task: replace(task, id="")), "its id is ''"),
    "a list of messages": (changed(messages=[user("say")]), "give a tuple"),
    "no messages": (of_first(lambda task: replace(task, messages=())), "at least one Message"),
    "text for a message": (changed(messages=("say",)), "is a str, not a Message"),
    "an odd role": (changed(messages=(Unchecked("robot", ()),)), "role 'robot'"),
    "an odd part": (changed(messages=(Unchecked("user", ("hi",)),)), "is no part"),
    "a number for a text": (
        changed(messages=(Unchecked("user", (UncheckedText(3),)),)),
        "the text of a user message is a int",
    ),
    "another order": (shuffled, "fixed order"),
    "another order in threads": (thread_bound, "in a thread"),
    "one id twice": (lambda tasks, split: [*tasks, tasks[0]], "unique"),
    "one id in both splits": (of_first(lambda task: replace(task, id="1")), "unique"),
    "one task in both splits": (
        lambda tasks, split: [*tasks, Task(f"{split} again", (user("say it"),), "it")],
        "the same content in both splits",
    ),
    "an answer without JSON": (of_first(lambda task: replace(task, answer=Odd())), "its answer holds a"),
    "metadata without JSON": (of_first(lambda task: replace(task, metadata={"a": [Odd()]})), "its metadata holds a"),
    "cannot be pickled": (of_first(lambda task: replace(task, metadata={"a": Local()})), "cannot be pickled: not me"),
    "a picture that is none": (
        of_first(lambda task: replace(task, messages=(user(Image(task.id.encode())),))),
        "cannot be shown",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_faults_of_tasks(name: str) -> None:
    change, said = TASKS[name]
    with pytest.raises(AssertionError) as caught:
        check_environment(Changed(Good.Config(), change))
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value


# --- plays ------------------------------------------------------------------------------------------------------------


class Raises(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        int((await chat(*task.messages)).text or "0")


class Silent(Good):
    async def play(self, task: Task, chat: Chat) -> None: ...


class Waits(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        await chat(*task.messages)
        await asyncio.Event().wait()


class Blocks(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        await chat(*task.messages)
        time.sleep(4)


class Garbage(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        await chat(Unchecked("user", (3,)))


class SharedState(Good):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.said = ""

    async def play(self, task: Task, chat: Chat) -> None:
        self.said = task.id
        await chat(*task.messages)
        await chat(f"it was {self.said}")


class Counts(Good):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.plays = 0

    async def play(self, task: Task, chat: Chat) -> None:
        self.plays += 1
        await chat(f"play {self.plays}")


class Chance(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        await chat("heads" if random.random() < 0.5 else "tails")


class LeavesWork(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        self.kept = asyncio.create_task(asyncio.sleep(60))
        await chat(*task.messages)


class LeavesWorkWhenCancelled(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        watch = asyncio.create_task(asyncio.sleep(60))
        await chat(*task.messages)
        watch.cancel()


class Stubborn(Good):
    async def play(self, task: Task, chat: Chat) -> None:
        try:
            await chat(*task.messages)
        except asyncio.CancelledError:
            return


class ClosesOnce(Good):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


PLAYS: dict[type[Good], str] = {
    ClosesOnce: "close() called twice raises RuntimeError: closed already",
    Raises: "fails by ValueError: invalid literal for int()",
    Silent: "before the policy said anything",
    Waits: "it waits for something that never comes",
    Blocks: "it blocks the event loop",
    Garbage: "a user message holds 3, which is no part",
    SharedState: "beside others it is another one",
    Counts: "played again under the same key",
    Chance: "draw by chat.random",
    LeavesWork: "has ended, 1 of its tasks are still at work",
    LeavesWorkWhenCancelled: "was cancelled, 1 of its tasks are still at work",
    Stubborn: "let CancelledError pass",
}


@pytest.mark.parametrize("cls", PLAYS, ids=lambda cls: cls.__name__)
def test_faults_of_plays(cls: type[Good]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_environment(cls(cls.Config()), seconds=0.5 if cls in (Waits, Blocks) else 20.0)
    assert PLAYS[cls] in str(caught.value) and "\n" not in str(caught.value), caught.value
