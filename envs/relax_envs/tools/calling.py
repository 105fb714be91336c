"""The calls of one reply, run side by side, and what the policy is told of each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from relax_core.errors import ConfigError, nearest
from relax_core.types import Audio, CallError, Image, Message, Text, ToolCall, ToolResult, Video
from relax_envs.cut import Keep, cut_all
from relax_envs.named import in_words
from relax_envs.tools.parameters import quoted
from relax_envs.tools.tool import Tool, ToolError, ToolFailed, parts_of

if TYPE_CHECKING:
    from relax_core.chat import Chat

Parts = tuple[Text | Image | Audio | Video, ...]


async def answer(
    calls: Sequence[ToolCall | CallError], tools: Sequence[Tool], chat: Chat, *, limit: int, keep: Keep = "head"
) -> Message:
    """Run the calls of a reply, and give their results in the order of the calls: the next message of the chat.

    A call that cannot be run (malformed, of an unknown tool, with wrong arguments), or whose tool raises ToolError,
    has the reason as its result. The text of a result is cut to ``limit`` characters, ``keep`` says of which side;
    media are not. Every call counts in the play's limit. Raises ToolFailed, with the tool's name, for anything else
    that a tool raises; the other calls are cancelled then, as all are when the play is.
    """
    named = by_name(tools)
    chat.count_calls(len(calls))
    running = [asyncio.create_task(_result(number, call, named)) for number, call in enumerate(calls, 1)]
    try:
        found = await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # until their tools have cleaned up
    ids = [call.id if isinstance(call, ToolCall) else "" for call in calls]
    results = zip(found, ids, strict=True)
    return Message("tool", tuple(ToolResult(shortened(parts, limit, keep), id) for parts, id in results))


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Raises ConfigError for two tools of one name."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"tools: two are called {tool.name!r}: a call could mean either; rename one")
        named[tool.name] = tool
    return named


def shortened(parts: Parts, limit: int, keep: Keep) -> Parts:
    """A result whose texts together have at most ``limit`` characters, and a note where some are missing."""
    texts = iter(cut_all([part.text for part in parts if isinstance(part, Text)], limit, keep))
    found = (Text(next(texts)) if isinstance(part, Text) else part for part in parts)
    return tuple(part for part in found if part != Text(""))


async def _result(number: int, call: ToolCall | CallError, tools: Mapping[str, Tool]) -> Parts:
    if isinstance(call, CallError):
        return (Text(call.text),)
    tool = tools.get(call.name)
    if tool is None:
        near = nearest(call.name, tools) or f"; there {'are' if len(tools) != 1 else 'is'} {', '.join(tools) or 'none'}"
        return _not_run(number, f"there is no tool {quoted(call.name)}{near}")
    try:
        arguments = tool.read(call.arguments)
    except ToolError as error:
        return _not_run(number, f"{tool.name}: {error}")
    return await _run(tool, arguments)


def _not_run(number: int, reason: str) -> Parts:
    end = "" if reason.endswith(("?", ".")) else "."
    return (Text(f"Tool call {number} was not run: {reason}{end}"),)


async def _run(tool: Tool, arguments: Mapping[str, object]) -> Parts:
    """Raises ToolFailed."""
    try:
        return parts_of(await tool(arguments))
    except ToolError as error:
        return (Text(str(error)),)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ToolFailed(f"tool {tool.name}: CancelledError, and nobody cancelled it") from error
    except SystemExit as error:  # it would end the whole program
        raise ToolFailed(f"tool {tool.name}: it asked Python to exit ({error.code})") from error
    except Exception as error:
        raise ToolFailed(f"tool {tool.name}: {in_words(error)}") from error
