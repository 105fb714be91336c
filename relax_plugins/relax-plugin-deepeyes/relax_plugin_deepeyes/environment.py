"""Environment ``deepeyes``: questions about pictures, sounds and videos, with tools that look closer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from relax_core.types import MEDIA_KINDS, Decoded, MediaKind, Message, Task, system
from relax_envs.data.environment import RowsEnvironment
from relax_envs.tools.environment import ToolEnvironment
from relax_envs.tools.tool import Tool, ToolError
from relax_plugin_deepeyes.looking import ListenCloser, Look, Rotate, Rules, Source, WatchCloser, ZoomIn

if TYPE_CHECKING:
    from relax_core.chat import Chat

ToolName = Literal["image_zoom_in_tool", "image_rotate_tool", "audio_zoom_in_tool", "video_zoom_in_tool"]

TOOLS: dict[ToolName, type[Look]] = {
    "image_zoom_in_tool": ZoomIn,
    "image_rotate_tool": Rotate,
    "audio_zoom_in_tool": ListenCloser,
    "video_zoom_in_tool": WatchCloser,
}

INSTRUCTIONS = """\
You are a helpful assistant who answers questions about what you are shown. First think about what you see and what you
still need to know, between <think> and </think>. Then do one of two things: if details are too small, call tools to
look closer, once or several times; if you know enough, write the answer between <answer> and </answer>.
Your reply is one of:
<think>...</think><tool_call>...</tool_call>
<think>...</think><answer>...</answer>"""

HINT = """\
Think about what this shows, between <think> and </think>. Then look closer with further tool calls, or answer between
<answer> and </answer>."""


class DeepEyes(RowsEnvironment, ToolEnvironment):
    """Data sets as ``single_turn`` reads them, played over many turns: the policy thinks, looks closer by tools, and
    answers (DeepEyes, arXiv 2505.14362). What a tool shows is cut from the original medium, whatever size the model has
    seen it in. A task that has a system message of its own keeps it."""

    class Config(ToolEnvironment.Config, RowsEnvironment.Config, Rules):
        tools: Annotated[tuple[ToolName, ...], Field(min_length=1)] = ("image_zoom_in_tool", "image_rotate_tool")
        """Which tools there are."""
        instructions: Annotated[str, Field(min_length=1)] = INSTRUCTIONS
        """What the system message says, besides the tools, where a task has none of its own."""
        hint: str = HINT
        """What is said behind everything that a tool shows; may be empty."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._instructions = system(config.instructions)

    def tools(self, task: Task, chat: Chat) -> Sequence[Tool]:
        config, source = self.config, shown_in(chat)
        return [TOOLS[name](source, config, hint=config.hint) for name in config.tools]

    def announced(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
        own = bool(messages) and messages[0].role == "system"
        return super().announced(messages if own else (self._instructions, *messages), tools)


def shown_in(chat: Chat) -> Source:
    """The media of the conversation so far, in the order in which they were shown."""

    async def source(kind: MediaKind, index: int) -> Decoded:
        media = [part for message in chat.history for part in message.media() if MEDIA_KINDS[type(part)] == kind]
        if index >= len(media):
            raise ToolError(f"There is no {kind} {index}: there are {len(media)} so far, counted from 0.")
        return await chat.decoded(media[index])

    return source
