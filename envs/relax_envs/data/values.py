"""What values of a row mean: which are missing, what they are called, and how foreign ones become plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

_NAMES = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", type(None): "null"}


class RowError(ValueError):
    """Why a row is no task: one line, without the file and the line's number."""


def missing(value: Any) -> bool:
    """Null, NaN, and text, bytes, lists and objects that are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str | bytes | list | tuple | Mapping) and not value


def kind_name(value: Any) -> str:
    """What kind of value it is, in the words of JSON."""
    return _NAMES.get(type(value), type(value).__name__)


def short(text: str, limit: int = 300) -> str:
    """Text that is shortened in the middle to about ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} ... {text[-(limit // 3) :]}"


def is_well_formed(text: str) -> bool:
    """Whether UTF-8 can hold the text: half of a surrogate pair, which JSON may spell, it cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def holds_bytes(value: Any) -> bool:
    """Whether there are bytes anywhere in a plain value."""
    if isinstance(value, bytes):
        return True
    if isinstance(value, dict):
        return any(map(holds_bytes, value.values()))
    return isinstance(value, list) and any(map(holds_bytes, value))


def plain(value: Any) -> Any:
    """A value from Arrow, numpy or a user's function as plain Python: dict, list, text, numbers, bool, bytes, None.

    Nulls inside of objects are left out: Arrow fills every field that any other row has. Dates and times become ISO
    text, durations seconds, decimals numbers.
    """
    kind = type(value)  # the usual types first: this runs for every value of every row
    if kind is str or kind is int or kind is float or kind is bool or kind is bytes or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        if value and all(isinstance(v, tuple) and len(v) == 2 for v in value):  # how Arrow gives a map
            return {str(key): plain(v) for key, v in value}
        return [plain(v) for v in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if type(value).__name__ in ("NaTType", "NAType"):  # how pandas says null
        return None
    if isinstance(value, bool | int | float | str):  # subclasses, numpy's float64 among them
        return next(t(value) for t in (bool, int, float, str) if isinstance(value, t))
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if hasattr(value, "as_py"):
        return plain(value.as_py())
    if hasattr(value, "tolist"):  # of numpy, and Arrow's arrays
        return plain(value.tolist())
    return value
