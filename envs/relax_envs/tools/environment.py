"""Environments in which a policy calls tools: ask, run the calls, tell the results, until a reply makes no call."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from relax_core.interfaces import ComponentConfig, Environment
from relax_core.types import CallError, Message, Task, Text, ToolCall, system
from relax_envs.cut import Keep
from relax_envs.tools.calling import answer
from relax_envs.tools.tool import Tool

if TYPE_CHECKING:
    from relax_core.chat import Chat

Announce = Literal["template", "text", "none"]


class ToolEnvironment(Environment):
    """Override ``tools`` (and ``tasks``): they are announced to the policy before a task's own messages, and run as it
    calls them; a reply without a call ends the play, as do the play's limits."""

    class Config(ComponentConfig):
        output_limit: PositiveInt = 10_000
        """Characters of text in one result; what is too long is cut, and says so."""
        output_keep: Keep = "head"
        """Which side of a text that is too long stays."""
        announce: Announce = "template"
        """How the policy learns of the tools: by the model's chat template; as text in the system message; or not
        at all, since the prompts say it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._systems: dict[tuple[int, str], tuple[Message | None, Message]] = {}

    @abstractmethod
    def tools(self, task: Task, chat: Chat) -> Sequence[Tool]:
        """The tools of one play. They may share a state of this play: make them anew then."""

    async def play(self, task: Task, chat: Chat) -> None:
        tools = self.tools(task, chat)
        reply = await chat(*self.announced(task.messages, tools))
        while reply.calls:
            reply = await chat(await self.answer(reply.calls, tools, chat))

    async def answer(self, calls: Sequence[ToolCall | CallError], tools: Sequence[Tool], chat: Chat) -> Message:
        """The results of a reply's calls, cut as the config says: see ``relax_envs.tools.answer``."""
        return await answer(calls, tools, chat, limit=self.config.output_limit, keep=self.config.output_keep)

    def announced(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
        """The messages that begin a play, with the tools declared in the system message, which is made if need be.

        Members of a group get the very same system message, so that it is encoded once.
        """
        if self.config.announce == "none" or not tools:
            return tuple(messages)
        own = messages[0] if messages and messages[0].role == "system" else None
        key = (id(own), _as_text(tools))
        if key not in self._systems:
            if len(self._systems) >= _MOST_SYSTEMS:
                self._systems.clear()
            self._systems[key] = (own, self._system(own, tools))  # which keeps ``own``, and so its id
        return (self._systems[key][1], *messages[own is not None :])

    def _system(self, own: Message | None, tools: Sequence[Tool]) -> Message:
        said = own.parts if own is not None else ()
        if self.config.announce == "template":
            return system(*said, *(tool.spec for tool in tools))
        return system(*said, Text("\n\n" * bool(said) + _ANNOUNCEMENT.format(tools=_as_text(tools))))


_MOST_SYSTEMS = 256
"""Announcements that are remembered."""

_ANNOUNCEMENT = """\
You can use tools. What each does and takes, as JSON:
{tools}
To use one, write {{"name": ..., "arguments": {{...}}}} between <tool_call> and </tool_call>. Several calls in one reply
run at the same time; their results come next."""


def _as_text(tools: Sequence[Tool]) -> str:
    """One line of JSON for each."""
    shown = ({"name": t.name, "description": t.description, "parameters": dict(t.parameters)} for t in tools)
    return "\n".join(json.dumps(one, ensure_ascii=False) for one in shown)
