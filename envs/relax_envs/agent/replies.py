"""Replies as OpenAI's clients read them: one object, or the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from relax_core.types import ToolCall

_PIECE = 64
"""Characters of a chunk's text."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply of the policy. ``content``: its text without the ``calls``."""

    content: str
    calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    reply_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.reply_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.reply_tokens, "total_tokens": total}


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of an answer say. ``created``: seconds since 1970."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, model: str) -> Self:
        return cls(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """The answer to a request that wants no stream."""
        said: dict[str, Any] = {"role": "assistant", "content": answered.content, "refusal": None}
        if answered.calls:
            said["content"] = answered.content or None
            said["tool_calls"] = [_call(call) for call in answered.calls]
        choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": answered.finish}
        return self._with("chat.completion", choices=[choice], usage=answered.usage)

    def chunks(self, answered: Answered, usage: bool) -> Iterator[dict[str, Any]]:
        """What comes behind the first chunk, which says the role."""
        for text in _pieces(answered.content):
            yield self.chunk({"content": text})
        for i, call in enumerate(answered.calls):
            begun = _call(call)
            begun["function"]["arguments"] = ""
            yield self.chunk({"tool_calls": [{"index": i, **begun}]})
            for text in _pieces(_arguments(call)):
                yield self.chunk({"tool_calls": [{"index": i, "function": {"arguments": text}}]})
        yield self.chunk({}, answered.finish)
        if usage:
            yield self._with("chat.completion.chunk", choices=[], usage=answered.usage)

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
        return self._with("chat.completion.chunk", choices=[choice])

    def _with(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model} | more


def event(value: Mapping[str, Any] | str) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}


def _arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _pieces(text: str) -> list[str]:
    return [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
