"""Blocking calls beside an event loop, in daemon threads: one that never returns holds nothing up."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from relax_core.errors import RelaxError

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str, ended: Callable[[], object] = lambda: None) -> T:
    """The result of a call in a thread of its own, called ``name``; what it raises is raised here.

    Who stops waiting does not end it: ``ended`` is called on the loop when it has returned. SystemExit and the like
    become a RelaxError: they end the call, not the program.
    """
    work, result = _work(call, ended)
    threading.Thread(target=work, daemon=True, name=name).start()
    return await result


async def stoppable(call: Callable[[threading.Event], T], name: str, ended: Callable[[], object] = lambda: None) -> T:
    """The same for a call that looks at an event: it is set when nobody waits for the result any more."""
    stop = threading.Event()
    try:
        return await in_thread(lambda: call(stop), name, ended)
    finally:
        stop.set()


class Line:
    """A thread that does calls one after the other: for things that want to be used by one thread only."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name=name).start()

    async def __call__(self, call: Callable[[], T]) -> T:
        """The result of a call, behind those before it; as ``in_thread`` gives it."""
        work, result = _work(call, lambda: None)
        self._calls.put(work)
        return await result

    def end(self, call: Callable[[], object]) -> None:
        """Do a last call behind those before it; nobody waits for it, or hears what it raises."""

        def last() -> None:
            with suppress(Exception):
                call()

        self._calls.put(last)
        self._calls.put(None)

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _work(call: Callable[[], T], ended: Callable[[], object]) -> tuple[Callable[[], None], asyncio.Future[T]]:
    """What a thread has to do, and what it settles."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        ended()
        if not result.done():
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(call)
        except StopIteration as raised:  # a future cannot hold it
            error = RelaxError(f"StopIteration: {raised}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RelaxError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    return work, result
