"""A grader's process, ``python -m relax_envs.graders.worker SETTINGS``; ``pool.py`` starts it. Imports next to nothing.

SETTINGS is JSON: ``functions`` (``module:function``, loaded before the first job), ``parent`` (the process that it ends
with) and ``memory`` (bytes of address space, or null). On the standard input comes one JSON line a job,
``[function, arguments]``, on the standard output goes one line ``{"ready": true}`` and then two a job, in order:
``{"began": true}``, and ``{"value": ...}`` or ``{"raised": "ValueError: ..."}``, with ``"last": true`` if the process
ends with it. What a function prints goes to the standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

LONGEST_TEXT = 500
"""Characters of an error's text."""
PR_SET_PDEATHSIG, SIGKILL = 1, 9


def main() -> None:
    settings = json.loads(sys.argv[1])
    jobs, results = _pipes()
    _end_with(settings["parent"])
    _limit(settings["memory"])
    try:
        functions = {name: load(name) for name in settings["functions"]}
    except BaseException as error:
        _write(results, {"raised": _in_words(error), "last": True})
        return
    _write(results, {"ready": True})
    for line in jobs:
        _write(results, {"began": True})
        if _write(results, _run(functions, line)):
            return


def load(name: str) -> Callable[..., Any]:
    """The function ``module:function``. Raises ImportError, AttributeError, or TypeError for what cannot be called."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return found  # type: ignore[no-any-return]


def _run(functions: dict[str, Callable[..., Any]], line: bytes) -> dict[str, Any]:
    try:
        name, arguments = json.loads(line)
        value = functions[name](*arguments)
        json.dumps(value)
        return {"value": value}
    except MemoryError:  # what is left of the process is not to be trusted
        return {"raised": "MemoryError: the grader needed more memory than it may have", "last": True}
    except BaseException as error:  # a function that calls sys.exit raised, too
        return {"raised": _in_words(error)}


def _write(results: BinaryIO, reply: dict[str, Any]) -> bool:
    """Sends a reply; whether it was the last one."""
    results.write(json.dumps(reply).encode() + b"\n")
    results.flush()
    return bool(reply.get("last"))


def _in_words(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}"[:LONGEST_TEXT]


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool, moved to where nothing that a function reads or prints can disturb them."""
    jobs, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return jobs, results


def _end_with(parent: int) -> None:
    """Let this process die with the pool's, in the middle of a job; a closed standard input ends it between two."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(0)
        return
    import threading
    import time

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _limit(memory: int | None) -> None:
    """No core files, and at most ``memory`` bytes where the system can enforce it."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None and sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_AS, (memory, most))


if __name__ == "__main__":
    main()
