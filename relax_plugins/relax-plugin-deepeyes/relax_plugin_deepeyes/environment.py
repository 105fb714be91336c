"""Environment ``deepeyes``: questions about pictures, sounds and videos, with tools that look closer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from relax_core.types import MEDIA_KINDS, Decoded, MediaKind, Task, system
from relax_envs.single_turn import SingleTurn
from relax_envs.tools.environment import ToolEnvironment
from relax_envs.tools.tool import Tool, ToolError
from relax_plugin_deepeyes.boxes import BoxRules
from relax_plugin_deepeyes.looking import ListenCloser, Rotate, Source, WatchCloser, ZoomIn
from relax_plugin_deepeyes.spans import SpanRules

if TYPE_CHECKING:
    from relax_core.chat import Chat

ToolName = Literal["image_zoom_in_tool", "image_rotate_tool", "audio_zoom_in_tool", "video_zoom_in_tool"]

SYSTEM = """\
You are a helpful assistant who answers questions about what you are shown. First think about what you see and what you
still need to know, between <think> and </think>. Then do one of two things: if details are too small, call tools to
look closer, once or several times; if you know enough, write the answer between <answer> and </answer>.
Your reply is one of:
<think>...</think><tool_call>...</tool_call>
<think>...</think><answer>...</answer>"""

HINT = """\
Think about what this shows, between <think> and </think>. Then look closer with further tool calls, or answer between
<answer> and </answer>."""


class DeepEyes(ToolEnvironment):
    """Data sets as ``single_turn`` reads them, played over many turns: the policy thinks, looks closer by tools, and
    answers (DeepEyes, arXiv 2505.14362). What a tool shows is cut from the original medium, whatever size the model has
    seen it in. A task that has a system message of its own keeps it, and says in it what it wants."""

    class Config(ToolEnvironment.Config, SingleTurn.Config):
        tools: Annotated[tuple[ToolName, ...], Field(min_length=1)] = ("image_zoom_in_tool", "image_rotate_tool")
        """Which tools there are."""
        boxes: BoxRules = BoxRules()
        """How bounding boxes are read."""
        spans: SpanRules = SpanRules()
        """How spans of time are read."""
        system: str = SYSTEM
        """What the system message says, besides the tools."""
        hint: str = HINT
        """What is said behind everything that a tool shows; may be empty."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._data = SingleTurn(config)
        self._system = system(config.system)

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return self._data.tasks(split)

    def tools(self, task: Task, chat: Chat) -> Sequence[Tool]:
        config, source = self.config, shown_in(chat)
        made: dict[ToolName, Tool] = {
            "image_zoom_in_tool": ZoomIn(source, config.boxes, config.hint),
            "image_rotate_tool": Rotate(source, config.hint),
            "audio_zoom_in_tool": ListenCloser(source, config.spans, config.hint),
            "video_zoom_in_tool": WatchCloser(source, config.spans, config.hint),
        }
        return [made[name] for name in config.tools]


def shown_in(chat: Chat) -> Source:
    """The media of the conversation so far, in the order in which they were shown."""

    async def source(kind: MediaKind, index: int) -> Decoded:
        media = [part for message in chat.history for part in message.media() if MEDIA_KINDS[type(part)] == kind]
        if index >= len(media):
            raise ToolError(f"There is no {kind} {index}: there are {len(media)} so far, counted from 0.")
        return await chat.decoded(media[index])

    return source
