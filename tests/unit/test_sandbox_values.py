"""Values as text: equal where Python calls them equal, and what they hold, not what they say of themselves."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from relax_envs.sandbox.canonical import Unsayable, canonical

PAIR: Any = namedtuple("PAIR", "x y")


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "3"

    def __index__(self) -> int:
        return 3


class LyingList(list[int]):
    def __eq__(self, other: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter([1, 2, 3])

    def __len__(self) -> int:
        return 3


class LyingText(str):
    def __str__(self) -> str:
        return "right"

    __repr__ = __str__


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        ({1, 2}, {2, 1}),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}),
        ((), ()),
        (-0.0, 0),
        (1e20, 10**20),
        (0.1, Fraction(0.1)),
        (Decimal("0.5"), 0.5),
        (Fraction(6, 2), 3),
        (2 + 0j, 2),
        (10**400, 10**400),
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(int, a=1), OrderedDict(a=1)),
        (PAIR(1, 2), (1, 2)),
        ({"a": 1}.keys(), {"a"}),
        (frozenset({1}), {1.0}),
        (bytearray(b"a"), b"a"),
    ],
)
def test_equal_values_have_one_text(one: Any, other: Any) -> None:
    assert one == other and canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, "1"),
        ([1], (1,)),
        ({1}, [1]),
        ("a", b"a"),
        (None, False),
        (1.5, 1),
        ([[1], 2], [[1, 2]]),
        ({}, set()),
        ("a,b", ["a", "b"]),
        (["a,b"], ["a", "b"]),
        (10**400, 10**400 + 1),
        (0.1 + 0.2, 0.3),
        (1e308, 1.0000000000000002e308),
        ({1: 2}, {"1": 2}),
        ({1, 2}, {(1, 2)}),
    ],
)
def test_different_values_have_different_texts(one: Any, other: Any) -> None:
    assert one != other and canonical(one) != canonical(other)


@pytest.mark.parametrize(
    ("liar", "truth"), [(Liar(7), 7), (LyingList([9]), [9]), (LyingText("wrong"), "wrong"), ([Liar(7)], [7])]
)
def test_what_a_value_says_of_itself_does_not_matter(liar: Any, truth: Any) -> None:
    assert canonical(liar) == canonical(truth)


def test_as_json_has_it() -> None:
    assert canonical((1, (2,)), as_json=True) == canonical([1, [2]])
    assert canonical({1: "a"}, as_json=True) == canonical({"1": "a"})


def test_numbers_of_arrays_have_a_text() -> None:
    numpy = pytest.importorskip("numpy")
    assert canonical([numpy.int64(3), numpy.float32(0.5), numpy.bool_(True)]) == canonical([3, 0.5, 1])


def test_numbers_that_are_none() -> None:
    assert [canonical(float(one)) for one in ("nan", "inf", "-inf")] == ["nan", "inf", "-inf"]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("value", [object(), int, nested(500), len, [object()], {"a": {"b": range(3)}}])
def test_other_values_have_none(value: Any) -> None:
    with pytest.raises(Unsayable):
        canonical(value)


def test_a_value_in_itself_has_none() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(Unsayable):
        canonical(loop)
