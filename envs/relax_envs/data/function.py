"""A user's function that turns rows into other rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax_core.errors import ConfigError, nearest
from relax_envs.data.values import RowError, kind_name, plain


def load_function(call: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What ``package.module:name`` or ``path/file.py:name`` names, made safe: what it raises, or gives that is no row,
    becomes a RowError. Raises ConfigError when it cannot be imported."""
    module, _, name = call.rpartition(":")
    try:
        found: Any = _file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"columns.function: {module} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(found, name, None)
    if function is None:
        raise ConfigError(f"columns.function: {call!r}: {module} has no {name!r}{nearest(name, dir(found))}")
    if not callable(function):
        raise ConfigError(f"columns.function: {call!r} is a {type(function).__name__}, which cannot be called")

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        try:
            result = function(row)
        except Exception as error:
            text = " ".join(str(error).split())
            raise RowError(f"function {call}: {type(error).__name__}: {text}") from error
        if not isinstance(result, Mapping):
            raise RowError(f"function {call}: it gave {kind_name(result)}; a row (a dict) is expected")
        return plain(result)  # type: ignore[no-any-return]

    return changed


def _file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no such file (looked in {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"relax_rows_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
