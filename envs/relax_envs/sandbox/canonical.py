"""Plain values as text that is equal where Python calls them equal: what a child reports and its parent compares.

Without imports: the harness carries this file into the child.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEEPEST, MOST = 100, 2_000_000
"""Values nested deeper, or with more parts, have no text."""


class Unsayable(ValueError):
    """A value of a type that has no text here, or one too large."""


def canonical(value: object, as_json: bool = False) -> str:
    """The text of numbers, text, bytes, None, and lists, tuples, sets and dicts of them. Raises Unsayable.

    Of a subclass (Counter, a named tuple) what counts is what it holds, whatever it says of itself. ``as_json``: as
    JSON would have it: a tuple is a list, and a whole number as a key is text.
    """
    room = [MOST]

    def text(value: Any, depth: int) -> str:
        room[0] -= 1
        if depth > DEEPEST or room[0] < 0:
            raise Unsayable("too large")
        kinds = type(value).__mro__
        if (number := _number(value, kinds)) is not None:
            return number
        if str in kinds:
            return repr(str.__str__(value))
        if bytes in kinds or bytearray in kinds:
            return repr(bytes(value))
        if value is None:
            return "None"
        if list in kinds or (tuple in kinds and as_json):
            base: Any = list if list in kinds else tuple
            return "[" + ",".join([text(one, depth + 1) for one in base.__iter__(value)]) + "]"
        if tuple in kinds:
            return "(" + ",".join([text(one, depth + 1) for one in tuple.__iter__(value)]) + ")"
        if dict in kinds:
            pairs = [key(one, depth) + ":" + text(other, depth + 1) for one, other in dict.items(value)]
            return "{:" + ",".join(sorted(pairs)) + "}"
        if kinds[0] is type({}.keys()):
            value, kinds = {*value}, (set,)
        if set in kinds or frozenset in kinds:
            base = set if set in kinds else frozenset
            return "{" + ",".join(sorted([text(one, depth + 1) for one in base.__iter__(value)])) + "}"
        raise Unsayable(kinds[0].__name__)

    def key(value: Any, depth: int) -> str:
        whole = as_json and type(value) is int
        return repr(str(value)) if whole else text(value, depth + 1)

    return text(value, 0)


def _number(value: Any, kinds: tuple[type, ...]) -> str | None:
    """A number as an exact fraction; None for anything else."""
    if int in kinds:  # also bool
        return hex(int.__index__(value))
    if float in kinds:
        if value - value != 0:  # nan, inf, -inf
            return float.__repr__(value)
        return _ratio(*float.as_integer_ratio(value))
    if complex in kinds:
        real, imaginary = complex.real.__get__(value), complex.imag.__get__(value)
        shown = _number(real, (float,))
        return shown if imaginary == 0 else f"{shown}+{_number(imaginary, (float,))}j"
    kind = kinds[0]
    if kind.__module__ in ("decimal", "fractions") and hasattr(value, "as_integer_ratio"):
        return _ratio(*value.as_integer_ratio())
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "item"):
        plain = value.item()
        return _number(plain, type(plain).__mro__)
    return None


def _ratio(top: int, bottom: int) -> str:
    return hex(top) if bottom == 1 else f"{top:#x}/{bottom:#x}"
