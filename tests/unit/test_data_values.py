"""Values of rows: what counts as missing, and how foreign values become plain Python."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from relax_envs.data.values import holds_bytes, missing, plain, short

pd: Any = pytest.importorskip("pandas")


@pytest.mark.parametrize("value", [None, math.nan, np.float64("nan"), "", b"", [], (), {}], ids=repr)
def test_missing(value: Any) -> None:
    assert missing(value)


@pytest.mark.parametrize("value", [0, 0.0, False, " ", "null", [None], {"a": None}, math.inf], ids=repr)
def test_not_missing(value: Any) -> None:
    assert not missing(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(1.5), 1.5),
        (np.float64(1.5), 1.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.array(["x"], dtype=object), ["x"]),
        (np.datetime64("2024-05-01T00:00:00"), "2024-05-01T00:00:00"),
        (Decimal("1.10"), 1.1),
        (Decimal("1E+2"), 100),
        (Decimal("Infinity"), math.inf),
        (datetime(2024, 5, 1), "2024-05-01T00:00:00"),
        (timedelta(milliseconds=1500), 1.5),
        (pd.Timestamp("2024-05-01"), "2024-05-01T00:00:00"),
        (pd.NaT, None),
        (pd.NA, None),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (bytearray(b"x"), b"x"),
        (pa.scalar(3), 3),
        ((1, "x"), [1, "x"]),
        ([("k", 1), ("l", None)], {"k": 1, "l": None}),
        ({"a": {"b": None, "c": [{"d": None}]}, 3: "x"}, {"a": {"c": [{}]}, "3": "x"}),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_plain(value: Any, expected: Any) -> None:
    found = plain(value)
    assert found == expected and type(found) is type(expected)


def test_a_decimal_that_is_no_number() -> None:
    assert math.isnan(plain(Decimal("NaN")))


def test_bytes_anywhere() -> None:
    assert holds_bytes([{"a": [b"x"]}]) and not holds_bytes([{"a": ["x", None]}])


def test_short() -> None:
    assert short("abc") == "abc" and short("a" * 50 + "b" * 50, 30) == "a" * 20 + " ... " + "b" * 10
