"""A user's function behind reward ``function``: finding it, and choosing what it is called with."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.errors import ConfigError, nearest

PLAIN = ("response", "answer", "metadata", "messages")
"""What a function can be given in another process, too."""

PLAY = ("trajectory", "task", *PLAIN)
"""Names of parameters of a function that scores one play."""

GROUP = ("group", "trajectories", "task", "responses", "answer", "metadata", "messages")
"""Names of parameters of a function that scores a group."""

Function = Callable[..., Any]


def load(call: str) -> Function:
    """What ``package.module:name`` or ``path/file.py:name`` names; of a class, the class. Raises ConfigError."""
    module, colon, name = call.rpartition(":")
    if not colon or not module or not name:
        raise ConfigError(f"reward function: call: found {call!r}: write package.module:name, or path/file.py:name")
    try:
        found: Any = _file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"reward function: call: {module} cannot be imported: {_in_words(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"reward function: call: {call!r}: {module} has no {name!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"reward function: call: {call!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def _file(path: Path) -> Any:
    """The module of a file, executed once in a process."""
    path = path.resolve()
    name = f"relax_function_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def bound(call: str, options: Mapping[str, Any]) -> Function:
    """The function with its options as keywords; of a class, an instance made with them. Raises ConfigError."""
    found = load(call)
    if not inspect.isclass(found):
        return partial(found, **options) if options else found
    try:
        made = found(**options)
    except Exception as error:
        raise ConfigError(f"reward function: call: {call!r} cannot be made: {_in_words(error)}; see options") from error
    if not callable(made):
        raise ConfigError(f"reward function: call: instances of the class {call!r} cannot be called: give it __call__")
    return made


def parameters(function: Function, known: tuple[str, ...], call: str, options: Mapping[str, Any]) -> list[str] | None:
    """Which of the ``known`` names the function asks for as keywords; None: it takes the first one by position.

    Raises ConfigError for a function that needs anything else.
    """
    try:
        found = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # a builtin that does not tell
        return None
    where = f"reward function: call: {call!r}"
    keywords = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if clash := [name for name in options if name in known]:
        raise ConfigError(f"{where}: options.{clash[0]}: Relax itself gives the function its {clash[0]!r}: rename it")
    asked = [name for name in known if name in keywords]
    rest = any(p.kind is p.VAR_KEYWORD for p in found)
    needed = [p for p in found if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    other = [p for p in needed if p.name not in known or p.kind is p.POSITIONAL_ONLY]
    by_position = [p for p in other if p.kind is not p.KEYWORD_ONLY]
    meant = other and other[0].name not in known and other[0].name in (*PLAY, *GROUP)  # not available here
    if not asked and len(other) == 1 and by_position and not meant:
        return None
    if other:
        near = nearest(other[0].name, known)
        raise ConfigError(f"{where} needs {other[0].name!r}{near or ''}; it can have {', '.join(known)}, and options")
    if asked and not rest:
        return asked
    if rest:
        return list(known)
    if any(p.kind is p.VAR_POSITIONAL for p in found) or keywords:
        return None
    raise ConfigError(f"{where} has no parameter: give it one, or some of {', '.join(known)}")


def unknown_options(function: Function, options: Mapping[str, Any]) -> list[str]:
    """Options that the function has no parameter for."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return []
    names = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in options if name not in names]


def is_async(function: Function) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def in_process(call: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Calls the function in a worker process; ``given``: its parameters by name."""
    import asyncio

    from relax_envs.rewards.conversation import plain

    found = bound(call, options)(**given)
    return plain(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)


async def _awaited(found: Any) -> Any:
    return await found


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
