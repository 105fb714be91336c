"""A user's function that turns rows into other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_envs.data.values import RowError, kind_name, plain
from relax_envs.named import in_words, load


def load_function(call: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What ``package.module:name`` or ``path/file.py:name`` names, made safe: what it raises, or gives that is no row,
    becomes a RowError. Raises ConfigError when it cannot be imported."""
    function = load(call, "columns.function")

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        try:
            result = function(row)
        except Exception as error:
            raise RowError(f"function {call}: {in_words(error)}") from error
        if not isinstance(result, Mapping):
            raise RowError(f"function {call}: it gave {kind_name(result)}; a row (a dict) is expected")
        return plain(result)  # type: ignore[no-any-return]

    return changed
