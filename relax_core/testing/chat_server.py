"""A server of OpenAI's chat completions for tests: it answers as it is told, and remembers what was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_core.testing import json_server

Answer = str | tuple[int, Any]
"""The text of a completion, or a status and a body."""


class ChatServer(json_server.JsonServer):
    """``answer(number, body)`` says what becomes of each request, numbers from 0."""

    def __init__(self, answer: Callable[[int, Any], Answer]) -> None:
        super().__init__("/v1")
        self.answer = answer

    def _answered(self, number: int, body: Any) -> json_server.Answer:
        found = self.answer(number, body)
        return (200, completion(found)) if isinstance(found, str) else found


def completion(text: str | None, reason: str | None = "stop") -> dict[str, Any]:
    """The body of an answer. ``reason``: its ``finish_reason``."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}]}
