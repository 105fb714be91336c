"""How a client's calls reach the actor of the bus: those of one turn of its event loop go in one message."""

from __future__ import annotations

import asyncio
import itertools
import os
from functools import partial
from typing import Any

import ray

from relax_core.bus import BusError
from relax_plugin_ray.boxes import PIECE_BYTES, Box, wait
from relax_plugin_ray.bus_actor import Call, Failed, Pending

MESSAGE_BYTES = 4_000_000
"""A message that carries so much takes no further call. (Ray's limit is 10 MB.)"""
WAITING = frozenset({"claim", "put"})
"""Calls that may wait, and are undone when they are cancelled."""


class _Sent:
    """A call, its arguments, and the future that gets the answer."""

    __slots__ = ("call", "contents", "future", "nbytes")

    def __init__(self, call: Call, contents: list[Any], future: asyncio.Future[Any]) -> None:
        self.call, self.contents, self.future = call, contents, future
        self.nbytes = sum(len(content) for content in contents if isinstance(content, bytes))


class Calls:
    """Calls of one process to one actor, in order."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._outbox: list[_Sent] = []
        self._prefix = f"{os.urandom(6).hex()}-"
        self._numbers = itertools.count()

    def blocking(self, name: str, *values: Any, boxes: list[Box] | None = None) -> Any:
        """The answer to a call. Raises what the bus raised."""
        self._send()
        call, contents = self._call(name, values, boxes or [])
        try:
            return opened(wait(self._actor.one.remote(call, *contents)))
        except ray.exceptions.RayActorError as error:
            raise _gone(error) from error

    async def ask(self, name: str, *values: Any, boxes: list[Box] | None = None) -> Any:
        """The same, without blocking. Cancelled while it waits for the bus, it has done nothing."""
        loop = asyncio.get_running_loop()
        sent = _Sent(*self._call(name, values, boxes or []), loop.create_future())
        if not self._outbox:
            loop.call_soon(self._send)
        self._outbox.append(sent)
        try:
            return opened(await sent.future)
        except asyncio.CancelledError:
            if name in WAITING:
                if sent in self._outbox:
                    self._outbox.remove(sent)
                else:
                    self._actor.cancel.remote(sent.call.ticket)
            raise

    def _call(self, name: str, values: tuple[Any, ...], boxes: list[Box]) -> tuple[Call, list[Any]]:
        boxed: list[tuple[Box, int]] = []
        contents: list[Any] = []
        for box in boxes:
            if box.data is None:
                boxed.append((box, 0))
                contents.append(box.ref)
            else:
                pieces = [box.data[i : i + PIECE_BYTES] for i in range(0, len(box.data), PIECE_BYTES)]
                boxed.append((box, len(pieces)))
                contents += pieces
                box.data = None  # it is the actor's now
        return Call(f"{self._prefix}{next(self._numbers)}", name, values, boxed), contents

    def _send(self) -> None:
        calls, self._outbox = self._outbox, []
        while calls:
            count, size = 0, 0
            while count < len(calls) and size < MESSAGE_BYTES:
                size += calls[count].nbytes
                count += 1
            some, calls = calls[:count], calls[count:]
            contents = [content for sent in some for content in sent.contents]
            if len(some) == 1:
                self._expect(self._actor.one.remote(some[0].call, *contents), some, single=True)
            else:
                self._expect(self._actor.many.remote([sent.call for sent in some], *contents), some, single=False)

    def _expect(self, ref: Any, some: list[_Sent], single: bool) -> None:
        answer = asyncio.wrap_future(ref.future(), loop=some[0].future.get_loop())
        answer.add_done_callback(partial(self._answered, some, single))

    def _answered(self, some: list[_Sent], single: bool, answer: asyncio.Future[Any]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, ray.exceptions.RayActorError):
            error = _gone(error)
        for i, sent in enumerate(some):
            if sent.future.done():
                continue
            if error is not None:
                sent.future.set_exception(error)
            elif answer.cancelled():
                sent.future.cancel()
            else:
                found = answer.result() if single else answer.result()[i]
                if isinstance(found, Pending):
                    self._expect(self._actor.result.remote(sent.call.ticket), [sent], single=True)
                else:
                    sent.future.set_result(found)


def _gone(error: BaseException) -> BusError:
    return BusError(f"bus: its actor is gone ({type(error).__name__}); resume the run from its last checkpoint")


def opened(answer: Any) -> Any:
    """What was answered. Raises what the bus raised."""
    if isinstance(answer, Failed):
        raise answer.error
    return answer
