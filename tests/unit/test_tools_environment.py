"""Plays of environments with tools: announced, called, answered, ended; and the environment ``tool_use``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import yaml

from relax_core.chat import Chat
from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Environment
from relax_core.testing.scripted_plays import play
from relax_core.types import (
    Decoded,
    Image,
    Message,
    Stop,
    Task,
    Text,
    ToolResult,
    ToolSpec,
    Trajectory,
    system,
    user,
)
from relax_envs.tools import Tool, ToolEnvironment, ToolError, tool
from relax_envs.tools.use import ToolUse

PICTURE = Image(Decoded("image", np.zeros((4, 4, 3), np.uint8)))


class Drawers(ToolEnvironment):
    """Which drawer holds what must be looked up; each play opens its own."""

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return [Task("a", (user("what is in 2 ?"),), "sun", {"drawers": ["cat", "sun", "moon"]})]

    def tools(self, task: Task, chat: Any) -> Sequence[Tool]:
        opened: list[int] = []

        @tool
        def look(at: int) -> Any:
            """What is in a drawer; each opens once."""
            if not 1 <= at <= 3:
                raise ToolError(f"There is no drawer {at}.")
            if at in opened:
                return None
            opened.append(at)
            return [task.metadata["drawers"][at - 1], PICTURE]

        return [look]


def call(name: str = "look", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def environment(kind: type[Any] = Drawers, **settings: Any) -> Any:
    return kind(kind.Config.model_validate_json(json.dumps(settings)))


def played(env: Environment, *replies: str, task: Task | None = None) -> Trajectory:
    found = play(env, task or env.tasks("train")[0], replies)
    assert found.error is None, found.error
    return found


def results(trajectory: Trajectory, turn: int) -> list[tuple[Any, ...]]:
    (message,) = trajectory.turns[turn].prompt
    assert message.role == "tool"
    return [part.parts for part in message.parts if isinstance(part, ToolResult)]


# --- a play -----------------------------------------------------------------------------------------------------------


def test_calls_are_answered_until_a_reply_makes_none() -> None:
    two = f"I look. {call(at=2)}\n{call(at=5)}"
    found = played(environment(), two, call(at=2), "sun")
    assert [turn.reply.text for turn in found.turns] == [two, call(at=2), "sun"]
    assert results(found, 1) == [(Text("sun"), PICTURE), (Text("There is no drawer 5."),)]
    assert results(found, 2) == [(Text("The tool returned nothing."),)]
    assert found.stop is Stop.EOS


def test_each_play_has_its_own_tools() -> None:
    env = environment()
    for _ in range(2):
        assert results(played(env, call(at=1), "cat"), 1) == [(Text("cat"), PICTURE)]


def test_a_malformed_call_is_told_and_never_run() -> None:
    found = played(environment(), '<tool_call>{"name": "look", "arguments": {at: 2}}</tool_call>', "sun")
    ((told,),) = results(found, 1)
    assert told.text.startswith("Tool call 1 was not run: it is not valid JSON")


def test_calls_in_the_reasoning_are_no_calls() -> None:
    assert len(played(environment(), f"<think>{call(at=1)}</think>sun").turns) == 1


def test_a_tool_that_fails_is_an_error_of_the_play() -> None:
    task = Task("b", (user("?"),), metadata={"drawers": []})
    found = play(environment(), task, [call(at=1)])
    assert found.stop is Stop.ERROR and found.error is not None
    assert (found.error.type, found.error.text) == ("ToolFailed", "tool look: IndexError: list index out of range")


# --- announcing -------------------------------------------------------------------------------------------------------

LOOK = ToolSpec(
    "look",
    "What is in a drawer; each opens once.",
    {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
)


def said_first(env: Environment, task: Task | None = None) -> tuple[Message, ...]:
    return played(env, "sun", task=task).turns[0].prompt


def test_tools_are_declared_before_the_task() -> None:
    asked = user("what is in 2 ?")
    assert said_first(environment()) == (system(LOOK), asked)
    assert said_first(environment(announce="none")) == (asked,)
    first, last = said_first(environment(announce="text"))
    assert last == asked and first.role == "system" and '{"name": "look", "description": "What is' in first.text


def test_a_system_message_of_the_task_keeps_its_place() -> None:
    task = Task("c", (system("Be brief."), user("?")))
    assert said_first(environment(), task) == (system("Be brief.", LOOK), user("?"))
    first, _ = said_first(environment(announce="text"), task)
    assert first.text.startswith("Be brief.\n\nYou can use tools.")


def test_members_of_a_group_hear_the_very_same_system_message() -> None:
    env, task = environment(), Task("c", (system("Be brief."), user("?")))
    assert said_first(env, task)[0] is said_first(env, task)[0]
    assert said_first(env)[0] is said_first(env)[0]


def test_output_is_cut_as_the_config_says() -> None:
    assert results(played(environment(output_limit=2, output_keep="tail"), call(at=1), "cat"), 1) == [
        (Text("[1 characters left out]\nat"), PICTURE)
    ]


# --- tool_use ---------------------------------------------------------------------------------------------------------

OWN = '''
from relax_core.types import Text
from relax_envs.tools import Tool, tool


def double(n: int) -> int:
    """Twice n."""
    return 2 * n


@tool(name="greet")
def ready(whom: str) -> str:
    """Greets."""
    return f"hello {whom}"


class Counter(Tool):
    name, description = "count", "Counts its calls."
    parameters = {"type": "object", "properties": {}}

    def __init__(self, start):
        self.calls = start

    async def __call__(self, arguments):
        self.calls += 1
        return str(self.calls)


number = 3
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": "what is 6 times 7 ?", "answer": "42"}, {"prompt": "what is 2 times 2 ?", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def using(folder: Path, tools: str, **settings: Any) -> ToolUse:
    section = yaml.safe_load(tools.replace("own.py", str(folder / "own.py")))
    made: ToolUse = environment(ToolUse, data=str(folder / "rows.jsonl"), tools=section, **settings)
    return made


def test_rows_are_played_with_the_tools_of_the_run_file(folder: Path) -> None:
    env = using(
        folder,
        '[{id: function, path: "own.py:double", name: twice}, {id: function, path: "own.py:ready"},'
        ' {id: function, path: "own.py:Counter", options: {start: 7}}]',
    )
    tasks = env.tasks("train")
    assert [task.answer for task in tasks] == ["42", "4"]
    said = call("twice", n=21) + call("greet", whom="世界") + call("count")
    found = played(env, said, "42")
    assert results(found, 1) == [(Text("42"),), (Text("hello 世界"),), (Text("8"),)]
    first = found.turns[0].prompt[0]
    assert [spec.name for spec in first.parts if isinstance(spec, ToolSpec)] == ["twice", "greet", "count"]


def test_a_row_has_the_tools_that_it_names(folder: Path) -> None:
    wanted: list[Any] = [
        [{"type": "function", "function": {"name": "count"}}, {"name": "twice"}],
        [],  # as in all columns, nothing is nothing
        None,
        [{"name": "search"}],
    ]
    rows = [{"prompt": f"what is {i} ?", "answer": "4", "tools": names} for i, names in enumerate(wanted)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = using(
        folder,
        '[{id: function, path: "own.py:double", name: twice}, {id: function, path: "own.py:ready"},'
        ' {id: function, path: "own.py:Counter", options: {start: 7}}]',
    )
    given = [[tool.name for tool in env.tools(task, cast("Chat", None))] for task in list(env.tasks("train"))[:3]]
    every = ["twice", "greet", "count"]
    assert given == [["count", "twice"], every, every]
    with pytest.raises(DataError, match=r"its row asks for the tool 'search'.* has twice, greet, count: name it there"):
        env.tools(env.tasks("train")[3], cast("Chat", None))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guards are those of Linux")
def test_python_is_one_of_them(folder: Path) -> None:
    env = using(folder, "[{id: python, seconds: 20, allow_unsafe: true}]", output_keep="tail")
    found = played(env, call("python", code="print(6 * 7)"), "42")
    assert results(found, 1) == [(Text("42"),)]


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ('[{id: function, path: "own.py:duble"}]', "has no 'duble'; did you mean 'double'"),
        ('[{id: function, path: "own.py:number"}]', "is a int, which cannot be called"),
        ('[{id: function, path: "own.py:Counter"}]', "cannot be made: TypeError"),
        ('[{id: function, path: "own.py:double", options: {a: 1}}]', "options are for classes of tools"),
        ('[{id: function, path: "own.py:ready", name: other}]', "has a name and a description of its own"),
        ('[{id: function, path: "own.py:double"}, {id: function, path: "own.py:double"}]', "two are called 'double'"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(folder: Path, tools: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        using(folder, tools)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("tools", ["[]", "[{id: pyton}]", "[{id: python, second: 3}]", "[{path: a}]"])
def test_sections_are_strict(tools: str) -> None:
    with pytest.raises(ValueError, match="tools"):
        environment(ToolUse, data="rows.jsonl", tools=yaml.safe_load(tools))
