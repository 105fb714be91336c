"""Functions of users by name: ``package.module:name`` or ``path/file.py:name``, as run files and mappings give them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.errors import ConfigError, nearest

Function = Callable[..., Any]


def load(call: str, where: str) -> Function:
    """What is named; of a class, the class. Raises ConfigError that begins with ``where``."""
    module, colon, name = call.rpartition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{where}: found {call!r}: write package.module:name, or path/file.py:name")
    try:
        found: Any = _file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {in_words(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {call!r}: {module} has no {name!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where}: {call!r} is a {type(found).__name__}, which cannot be called")
    function: Function = found
    return function


def is_async(function: Function) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def in_words(error: BaseException) -> str:
    """An error's type and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _file(path: Path) -> Any:
    """The module of a file, executed once in a process."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} (looked in {Path.cwd()})")
    path = path.resolve()
    name = f"relax_function_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a file that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
