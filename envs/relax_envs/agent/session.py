"""A session is one play as an agent's client sees it: requests become turns of the play's chat, token for token.

A request goes on from the longest beginning of its conversation that was said before. Where that is the newest reply
of one of the chat's conversations, this one goes on; else another branches off there. So an agent may say the same
again in other words, try several ways, or let sub-agents talk at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from itertools import count
from typing import TYPE_CHECKING

from relax_core.chat import PlayOver
from relax_core.errors import DataError
from relax_core.types import Stop, ToolCall
from relax_envs.agent.errors import ApiError
from relax_envs.agent.replies import Answered
from relax_envs.agent.requests import Asked, Rules
from relax_envs.agent.tree import Node, Tree, reply_message

if TYPE_CHECKING:
    from relax_core.chat import Chat, Reply

MOST_AT_ONCE = 64
"""Requests of one session that may wait for their replies."""

_LIMITS = {
    Stop.TURNS: "limits.turns: the play has had all its turns",
    Stop.TOKENS: "limits.tokens: there is no room for more tokens in this conversation",
    Stop.TOOL_CALLS: "limits.tool_calls: the policy has called more tools than it may",
}


class Session:
    """Made in the event loop of the play, where all of it runs but ``submit``. ``key``: what a client shows."""

    def __init__(self, chat: Chat, rules: Rules, base_url: str) -> None:
        self.chat, self.rules, self.base_url = chat, rules, base_url
        self.key = secrets.token_urlsafe(32)
        self.replies = 0
        """How many were given."""
        self.over: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Has a result once no reply is given any more: the limit of the play, or the error, that ended it."""
        self._loop = asyncio.get_running_loop()
        self._tree = Tree(chat)
        self._busy: set[Chat] = set()
        self._running: set[asyncio.Task[Answered]] = set()
        self._call_ids = count()
        self._closed = False

    def submit(self, asked: Asked) -> concurrent.futures.Future[Answered]:
        """From any thread. The result is the reply, or an ApiError; cancel it when nobody waits for it any more.

        Raises ApiError when the play is known to be over.
        """
        self._check_open()
        work = self._serve(asked)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise _ended() from None

    async def close(self) -> None:
        """No request is served any more; those on their way get an error."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, asked: Asked) -> Answered:
        task = asyncio.current_task()
        assert task is not None
        self._check_open()
        if len(self._running) >= MOST_AT_ONCE:
            text = f"{MOST_AT_ONCE} requests of this session wait for replies already"
            raise ApiError(429, text, "too_many_requests", again=True)
        self._running.add(task)
        try:
            return await self._reply(asked)
        except asyncio.CancelledError:
            if self._closed:
                raise _ended() from None
            raise
        except DataError as error:
            raise ApiError(400, str(error), "invalid_messages", "messages") from error
        except (Exception, PlayOver) as error:
            if not self.over.done():
                self.over.set_result(error)
            raise _over(error) from error
        finally:
            self._running.discard(task)

    def _check_open(self) -> None:
        if self._closed:
            raise _ended()
        if self.over.done():
            raise _over(self.over.result())

    async def _reply(self, asked: Asked) -> Answered:
        node, new = self._tree.find(asked.messages)
        chat = self._conversation(node)
        self._busy.add(chat)
        try:
            reply = await chat(*new, max_new_tokens=asked.max_new_tokens)
        finally:
            self._busy.discard(chat)
        calls = self._named(reply) if asked.calls else ()
        content = reply.content if calls else reply.text
        self._tree.add(node, new, reply_message(content, calls), chat)
        self.replies += 1
        self.chat.count_calls(len(calls))
        return Answered(
            content=content,
            calls=calls,
            finish="tool_calls" if calls else "length" if reply.stop.cut else "stop",
            prompt_tokens=chat.tokens - reply.tokens,
            reply_tokens=reply.tokens,
        )

    def _conversation(self, node: Node[Chat]) -> Chat:
        """The one that ends with the node's reply, or a new one that goes on from there."""
        chat = node.where
        free = chat not in self._busy and chat.replies == node.depth
        return chat if free else chat.branch(node.depth)

    def _named(self, reply: Reply) -> tuple[ToolCall, ...]:
        """Ids are counted, so that a template that writes them writes the same whenever the play is played again."""
        found = [call for call in reply.calls if isinstance(call, ToolCall)]
        return tuple(ToolCall(call.name, call.arguments, f"call{next(self._call_ids):05}") for call in found)


def _over(reason: BaseException) -> ApiError:
    if isinstance(reason, PlayOver):
        text = _LIMITS.get(reason.stop, f"limits: {reason.stop}")
        return ApiError(429, f"{text}; the play ends here", f"limit_{reason.stop}")
    return ApiError(500, f"the play failed: {type(reason).__name__}: {reason}", "play_failed")


def _ended() -> ApiError:
    return ApiError(503, "the session has ended: its play is over", "session_ended")
