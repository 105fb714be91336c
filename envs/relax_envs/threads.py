"""Blocking calls beside an event loop, in threads that hold nothing up when they never return."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from relax_core.errors import RelaxError

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str, ended: Callable[[], object] = lambda: None) -> T:
    """The result of a call in a daemon thread of its own, called ``name``; what it raises is raised here.

    Who stops waiting does not end it: ``ended`` is called on the loop when it has returned. SystemExit and the like
    become a RelaxError: they end the call, not the program.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

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
            value = call()
        except StopIteration as raised:  # a future cannot hold it
            error = RelaxError(f"StopIteration: {raised}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RelaxError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    context = contextvars.copy_context()
    threading.Thread(target=lambda: context.run(work), daemon=True, name=name).start()
    return await result
