"""Between a Gymnasium environment and a policy: observations as parts of a message, replies as actions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_core.errors import ConfigError
from relax_core.types import Audio, Decoded, Image, Part, Text, Video
from relax_envs.cut import cut
from relax_envs.rewards.reply import final_part


def shown(observation: Any, limit: int) -> tuple[Part, ...]:
    """An observation as text and media, in order: arrays uint8 (H, W, 3) are images, mappings have a line for each key,
    other arrays a line for each row. A piece of text that is longer than ``limit`` characters is cut in its middle."""
    found: list[Part] = []
    lines: list[str] = []
    for piece in [*_pieces(observation), None]:
        if isinstance(piece, str):
            lines.append(piece)
            continue
        if lines:
            found.append(Text(cut("\n".join(lines), limit, "both")))
            lines = []
        if piece is not None:
            found.append(piece)
    return tuple(found)


def _pieces(value: Any) -> Iterator[str | Part]:
    """Lines of text, and media."""
    if isinstance(value, Text):
        yield value.text
    elif isinstance(value, Image | Audio | Video | str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _named(str(name), list(_pieces(inner)))
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        yield from _array(value)
    elif isinstance(value, tuple | list):
        if any(isinstance(one, Mapping | tuple | list | str | Part) or hasattr(one, "shape") for one in value):
            for one in value:
                yield from _pieces(one)
        else:
            yield _row(value)
    else:
        yield _number(value) if isinstance(value, int | float) else str(value)


def _named(name: str, pieces: Sequence[str | Part]) -> Iterator[str | Part]:
    """``name: 3`` where there is one line, else the name, and all pieces behind it."""
    if len(pieces) == 1 and isinstance(pieces[0], str) and "\n" not in pieces[0]:
        yield f"{name}: {pieces[0]}"
    else:
        yield f"{name}:"
        yield from pieces


def _array(value: Any) -> Iterator[str | Part]:
    import numpy as np

    array = np.asarray(value)
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size:
        yield Image(Decoded("image", np.array(array)))  # a copy: environments may write into theirs
    elif array.ndim == 0:
        yield _number(array.item())
    elif array.ndim == 1:
        yield _row(array.tolist())
    else:
        rows = array.reshape(-1, array.shape[-1]).tolist()
        yield from map(_row, rows)


def _row(values: Sequence[Any]) -> str:
    return " ".join(map(_number, values))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Actions:
    """What of a reply is its action: the text behind the reasoning, or what ``pattern`` finds last in it.

    ``names``: the value of each action that the policy can name; without them the text is JSON. ``space``: the
    environment's ``action_space``, if it has one: its kind decides what a list becomes, and what it does not contain
    is no action. Raises ConfigError for a name whose value the space does not contain.
    """

    def __init__(self, names: Mapping[str, Any] | None, pattern: str | None, space: Any) -> None:
        found: dict[str, Any] = {}
        for name, value in (names or {}).items():
            try:
                found[name.casefold()] = in_space(value, space)
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"environment gymnasium: actions.{name}: {value!r} is not in the action space {space}"
                ) from error
        self._names = None if names is None else found
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self._space = space

    def read(self, reply: str) -> Any:
        """Raises ValueError with what to tell the policy."""
        text = final_part(reply).strip()
        if self._pattern is not None:
            found = [one[one.re.groups and 1] for one in self._pattern.finditer(text)]
            if not found:
                raise ValueError(f"There is no action in your reply. {self._allowed}")
            text = (found[-1] or "").strip()
        try:
            if self._names is not None:
                return self._names[text.casefold()]
            return in_space(json.loads(text, parse_constant=_refuse), self._space)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"Your reply is not an action. {self._allowed}") from error

    @property
    def _allowed(self) -> str:
        if self._names is not None:
            return f"Write one of: {', '.join(self._names)}."
        return "Write a JSON value." if self._space is None else f"Write a JSON value for {self._space}."


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def in_space(value: Any, space: Any) -> Any:
    """A JSON value as the space wants it: lists as arrays or tuples. Raises ValueError for what it does not contain."""
    if space is None:
        return value
    made = _as_kind(value, space)
    if not space.contains(made):
        raise ValueError("the space does not contain it")
    return made


def _as_kind(value: Any, space: Any) -> Any:
    import numpy as np

    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping) and isinstance(value, Mapping):
        return {name: _as_kind(one, inner[name]) if name in inner else one for name, one in value.items()}
    if isinstance(inner, tuple | list) and isinstance(value, list):
        if len(value) != len(inner):
            raise ValueError("another number of parts")
        return tuple(_as_kind(one, part) for one, part in zip(value, inner, strict=True))
    dtype = getattr(space, "dtype", None)
    if inner is None and dtype is not None and isinstance(value, list):
        array = np.asarray(value)
        if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and np.dtype(dtype).kind in "iu"):
            raise ValueError("not of numbers of that kind")
        return array.astype(dtype)
    if isinstance(value, bool):
        raise ValueError("true and false are no actions")
    return np.asarray(value, dtype) if _is_real(dtype) and isinstance(value, int | float) else value


def _is_real(dtype: Any) -> bool:
    return getattr(dtype, "kind", "") == "f"
