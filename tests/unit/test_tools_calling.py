"""The calls of one reply: side by side, in order, and what the policy and the play are told when one goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from relax_core.chat import Chat
from relax_core.errors import ConfigError
from relax_core.types import CallError, Decoded, Image, Message, Text, ToolCall, ToolResult
from relax_envs.tools import Tool, ToolError, ToolFailed, answer, tool

PICTURE = Image(Decoded("image", np.zeros((4, 4, 3), np.uint8)))


class Counting:
    """What ``answer`` asks of a chat."""

    def __init__(self) -> None:
        self.calls = 0

    def count_calls(self, n: int) -> None:
        self.calls += n


@tool
def echo(text: str) -> str:
    """Says it again."""
    return text


def results(calls: Sequence[ToolCall | CallError], *tools: Tool, limit: int = 1000, keep: Any = "head") -> list[Any]:
    """The parts of each result; those of a single text as that text."""
    chat = Counting()
    message = asyncio.run(answer(calls, tools, cast("Chat", chat), limit=limit, keep=keep))
    assert isinstance(message, Message) and message.role == "tool" and chat.calls == len(calls)
    found: list[Any] = []
    for result, call in zip(message.parts, calls, strict=True):
        assert isinstance(result, ToolResult)
        assert result.id == (call.id if isinstance(call, ToolCall) else "")
        single = len(result.parts) == 1 and isinstance(result.parts[0], Text)
        found.append(result.parts[0].text if single else result.parts)  # type: ignore[union-attr]
    return found


def test_calls_run_side_by_side_and_results_keep_their_order() -> None:
    ended: list[int] = []
    gates = [asyncio.Event() for _ in range(3)]

    @tool
    async def wait(n: int) -> str:
        """Ends only when the next one has: in turn they would wait for ever."""
        if n + 1 < len(gates):
            await asyncio.wait_for(gates[n + 1].wait(), 30)
        gates[n].set()
        ended.append(n)
        return f"done {n}"

    calls = [ToolCall("wait", {"n": n}, f"id-{n}") for n in range(3)]
    assert results(calls, wait) == ["done 0", "done 1", "done 2"]
    assert ended == [2, 1, 0]


def test_a_call_that_cannot_be_run_is_answered_and_the_others_are_run() -> None:
    calls: list[ToolCall | CallError] = [
        CallError("Tool call 1 was not run: it is not an object."),
        ToolCall("echo", {"text": "北京 👍"}, "b"),
        ToolCall("ecko", {"text": "x"}, "c"),
        ToolCall("bring " + "x" * 500, {}, "d"),
        ToolCall("echo", {}, "e"),
        ToolCall("echo", {"text": 3, "to": 1}, "f"),
    ]
    said = results(calls, echo)
    assert said[0] == "Tool call 1 was not run: it is not an object."
    assert said[1] == "北京 👍"
    assert said[2] == "Tool call 3 was not run: there is no tool \"ecko\"; did you mean 'echo'?"
    assert said[3].endswith('…"; there is echo.') and len(said[3]) < 120
    assert said[4] == 'Tool call 5 was not run: echo: "text" is missing.'
    assert said[5].startswith('Tool call 6 was not run: echo: "text": input should be a valid string; there is no')


def test_what_a_tool_tells_the_policy_is_its_result() -> None:
    @tool
    def refuse() -> str:
        raise ToolError("The box lies outside.\nTry another.")

    assert results([ToolCall("refuse", {}), ToolCall("echo", {"text": "a"})], refuse, echo) == [
        "The box lies outside.\nTry another.",
        "a",
    ]


def failing(error: BaseException) -> Tool:
    @tool
    async def broken() -> str:
        raise error

    return broken


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("a"), "tool broken: KeyError: 'a'"),
        (SystemExit(3), "tool broken: it asked Python to exit (3)"),
        (asyncio.CancelledError(), "tool broken: CancelledError, and nobody cancelled it"),
    ],
)
def test_a_tool_that_fails_fails_the_play_and_the_other_calls_are_cancelled(error: BaseException, said: str) -> None:
    cancelled: list[str] = []

    @tool
    async def slow() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # it cleans up
            cancelled.append("slow")
            raise
        return "late"

    with pytest.raises(ToolFailed) as failed:
        results([ToolCall("slow", {}), ToolCall("broken", {})], slow, failing(error))
    assert str(failed.value) == said and cancelled == ["slow"]


def test_a_tool_that_gives_back_what_cannot_be_said_fails_the_play() -> None:
    @tool
    def odd() -> Any:
        return object()

    with pytest.raises(ToolFailed, match="tool odd: TypeError: it gave back a object"):
        results([ToolCall("odd", {})], odd)


def test_a_play_that_is_cancelled_cancels_its_tools() -> None:
    ended: list[str] = []

    @tool
    async def slow(name: str) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)
        return name

    async def play() -> None:
        calls = [ToolCall("slow", {"name": name}) for name in ("a", "b")]
        going = asyncio.create_task(answer(calls, [slow], cast("Chat", Counting()), limit=10))
        await asyncio.sleep(0.05)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going

    asyncio.run(play())
    assert sorted(ended) == ["a", "b"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("head", (Text("0123"), PICTURE, Text("ab\n[8 characters left out]"))),
        ("tail", (Text("[8 characters left out]"), PICTURE, Text("ef"), Text("ghij"))),
        ("both", (Text("012\n[8 characters left out]"), PICTURE, Text("hij"))),
    ],
)
def test_text_is_cut_on_the_chosen_side_and_media_are_not(keep: str, expected: Any) -> None:
    @tool
    def give() -> Any:
        return ["0123", PICTURE, "abcdef", "ghij"]

    assert results([ToolCall("give", {})], give, limit=6, keep=keep) == [expected]
    assert results([ToolCall("give", {})], give, limit=14, keep=keep)[0][1] == PICTURE


def test_a_tool_that_returns_nothing_says_so() -> None:
    @tool
    def put(at: int) -> None: ...

    assert results([ToolCall("put", {"at": 1})], put) == ["The tool returned nothing."]


def test_two_tools_of_one_name_are_an_error() -> None:
    with pytest.raises(ConfigError, match="two are called 'echo'"):
        results([], echo, echo)
