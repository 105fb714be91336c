"""A user's function behind reward ``function``: made with its options, and what it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from relax_core.errors import ConfigError, nearest
from relax_envs.named import Function, in_words, load

WHERE = "reward function: call"
"""How errors begin."""

PLAIN = ("response", "answer", "metadata", "messages")
"""What a function can be given in another process, too."""

PLAY = ("trajectory", "task", *PLAIN)
"""Names of parameters of a function that scores one play."""

GROUP = ("group", "trajectories", "task", "responses", "answer", "metadata", "messages")
"""Names of parameters of a function that scores a group."""


def bound(call: str, options: Mapping[str, Any]) -> Function:
    """The function with its options as keywords; of a class, an instance made with them. Raises ConfigError."""
    found = load(call, WHERE)
    if not inspect.isclass(found):
        return partial(found, **options) if options else found
    try:
        made = found(**options)
    except Exception as error:
        raise ConfigError(f"reward function: call: {call!r} cannot be made: {in_words(error)}; see options") from error
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


def in_process(call: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Calls the function in a worker process; ``given``: its parameters by name."""
    import asyncio

    from relax_envs.rewards.conversation import plain

    found = bound(call, options)(**given)
    return plain(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)


async def _awaited(found: Any) -> Any:
    return await found
