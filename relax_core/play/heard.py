"""A play that is followed as it goes: what is said is shown, and what there is of it survives its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from relax_core.interfaces import Environment
from relax_core.types import Message, message

if TYPE_CHECKING:
    from relax_core.chat import Chat, Reply
    from relax_core.types import Task


class Listener(Protocol):
    """Hears a play."""

    def said(self, messages: Sequence[object]) -> None:
        """By the environment; whatever it gave to ``chat``, good or bad."""

    def replied(self, reply: Reply) -> None:
        """By the policy."""

    def branched(self, turns: int) -> None:
        """Another conversation goes on behind so many replies."""


class HeardEnvironment(Environment):
    """An environment whose plays are heard. ``chat``: that of the newest play."""

    def __init__(self, environment: Environment, listener: Listener) -> None:
        super().__init__(environment.config)
        self.environment, self.listener = environment, listener
        self.chat: Chat | None = None

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return self.environment.tasks(split)

    async def play(self, task: Task, chat: Chat) -> None:
        self.chat = chat
        return await self.environment.play(task, cast("Chat", HeardChat(chat, self.listener)))

    async def close(self) -> None:
        await self.environment.close()


class HeardChat:
    """Passes on to a chat, and to who listens."""

    _chat: Chat
    _listener: Listener

    def __init__(self, chat: Chat, listener: Listener) -> None:
        object.__setattr__(self, "_chat", chat)
        object.__setattr__(self, "_listener", listener)

    async def __call__(self, *content: Message | str, max_new_tokens: int | None = None) -> Reply:
        new = [message("user", c) if isinstance(c, str) else c for c in content]
        self._listener.said(new)
        reply = await self._chat(*new, max_new_tokens=max_new_tokens)
        self._listener.replied(reply)
        return reply

    def branch(self, turns: int) -> HeardChat:
        other = HeardChat(self._chat.branch(turns), self._listener)
        self._listener.branched(turns)
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._chat, name, value)
