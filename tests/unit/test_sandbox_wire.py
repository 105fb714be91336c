"""What goes between judge and program: values arrive as they were, of builtin types, and nothing else does."""

from __future__ import annotations

import datetime
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from relax_envs.sandbox import wire
from relax_envs.sandbox.wire import DEEPEST, Decoder, Encoder, Unsayable

PAIR: Any = namedtuple("PAIR", "x y")


def encoded(value: Any) -> Any:
    def other(value: Any, encode: Encoder, depth: int) -> Any:
        node = encode.other_plain(value, depth)
        if node is None:
            raise Unsayable("a handle")
        return node

    return Encoder((), other)(value)


def decoded(node: Any) -> Any:
    def none(node: list[Any], decode: Decoder) -> Any:
        raise Unsayable(str(node))

    return Decoder((), none)(node)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 3

    __int__ = __index__


class LyingText(str):
    def __str__(self) -> str:
        return "right"


class LyingFloat(float):
    def __sub__(self, other: object) -> float:
        return 0.0


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        2**62,
        7**1500,
        1.5,
        float("-inf"),
        "ä\ud800\0",
        b"\0\xff",
        bytearray(b"\xff"),
        1 - 2j,
        [1, [2.0, "x"], ()],
        (1, (2,), []),
        {1: {"a": [None]}, (1, 2): 3, None: 4},
        {1, (2,)},
        frozenset({frozenset()}),
        Counter("aab"),
        Counter({"a": "no number"}),
        OrderedDict(b=1, a=[2]),
        defaultdict(list, a=[1]),
        deque([1, [2]], 3),
        range(1, 10**30, 2),
        slice(None, 2, None),
        Decimal("1.10"),
        Decimal("-Infinity"),
        Fraction(-1, 3),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.UTC),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2),
        datetime.timedelta(-1, 2, 3),
    ],
)
def test_values_arrive_as_they_were(value: Any) -> None:
    found = decoded(encoded(value))
    assert found == value and type(found) is type(value) and repr(found) == repr(value)
    assert [found] == decoded(encoded([value]))


def test_views_and_named_tuples() -> None:
    assert decoded(encoded({"a": 1}.keys())) == {"a"} and list(decoded(encoded({"a": 1}.values()))) == [1]
    assert decoded(encoded({"a": 1}.items())) == {("a", 1)}
    found = decoded(encoded(PAIR(1, [2])))
    assert found == (1, [2]) and found.y == [2] and repr(found) == "PAIR(x=1, y=[2])"


@pytest.mark.parametrize(
    ("liar", "truth"),
    [
        (Liar(7), 7),
        (LyingText("wrong"), "wrong"),
        (LyingFloat(-0.0), -0.0),
        ([Liar(7)], [7]),
        (PAIR(Liar(7), 1), (7, 1)),
    ],
)
def test_of_a_subclass_goes_what_it_holds(liar: Any, truth: Any) -> None:
    found = decoded(encoded(liar))
    assert truth == found and not isinstance(found, Liar | LyingText | LyingFloat)
    assert type(found) in (int, str, float, list) or found._fields == ("x", "y")


def test_what_is_one_object_stays_one() -> None:
    inner = [1]
    found = decoded(encoded([inner, inner, (inner,)]))
    assert found[0] is found[1] is found[2][0]
    loop: list[Any] = []
    loop.append({"a": loop})
    again = decoded(encoded(loop))
    assert again[0]["a"] is again


def test_what_is_nested_too_deep_cannot_be_said() -> None:
    value: list[Any] = []
    for _ in range(DEEPEST - 1):
        value = [value]
    assert decoded(encoded(value)) == value
    with pytest.raises(Unsayable):
        encoded([[[value]]])


def test_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(6, dtype="f4").reshape(2, 3).T
    found = decoded(encoded(value))
    assert found.dtype == value.dtype and (found == value).all() and found.flags.writeable
    assert decoded(encoded([numpy.int64(3), numpy.bool_(True)])) == [3, True]
    with pytest.raises(Unsayable):
        encoded(numpy.array([object()]))
    with pytest.raises(Unsayable):
        decoded(["a", "O", [1], "x" * 8])


@pytest.mark.parametrize(
    "node",
    [
        [],
        [[]],
        ["?"],
        ["l"],
        ["l", 5],
        ["l", "abc"],
        ["i", 5],
        ["i", "no"],
        ["b", 5],
        ["b", "\u1234"],
        ["B", 5],
        ["d", [[["l", []], 1]]],
        ["d", [1]],
        ["S", [["l", []]]],
        ["r", 0],
        ["r", "x"],
        ["D", "system", []],
        ["n", "P", ["x; import os"], [1]],
        ["n", "P", ["x"], [1, 2]],
        ["n", "class", ["x"], [1]],
        ["R", "x"],
        ["c", "1", "2"],
        ["T", "tzinfo", "x"],
        ["T", "date", "x"],
        ["E", "x", 1, 1],
        ["M", "x"],
        ["F", 1, 0],
        ["q", -1, []],
        ["a", "V8", [1], "x" * 8],
        ["k", 5],
        ["g", "os", "system"],
    ],
)
def test_what_is_no_value_is_refused(node: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, ArithmeticError, AttributeError)):
        decoded(node)


def test_the_child_s_modules_need_nothing_of_ours() -> None:
    """They are loaded by their path, without packages, and cost every run."""
    import subprocess

    code = (
        f"import sys; sys.path.insert(0, {str(Path(wire.__file__).parent)!r}); import judge, serve, landlock, seccomp\n"
        "print([m for m in ('relax_envs', 'relax_core', 'typing', 'numpy', 'asyncio', 'decimal') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "[]\n", found.stderr
