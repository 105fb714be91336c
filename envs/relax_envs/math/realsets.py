"""Sets of real numbers as disjoint intervals: one form for intervals, unions and inequalities that mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from relax_envs.math.evaluate import Evaluator
from relax_envs.math.nodes import Joined, Many, Node, Range, Reals, Relation, Sym, Value, infinite, is_node, symbols
from relax_envs.math.policy import Undefined

DIGITS = 200
Point = Any
"""A real number of mpmath; plus and minus infinity are some."""


class Interval(NamedTuple):
    """Ordered by where it begins."""

    low: Point
    low_open: bool
    high: Point
    high_closed: bool


RealSet = Sequence[Interval]


def real_set(value: Value) -> RealSet | None:
    """The set of reals that a value means; None for what means none. Raises Undefined where a bound has no value."""
    if isinstance(value, Range):
        return _interval(value.low, value.closed[0], value.high, value.closed[1])
    if isinstance(value, Reals):
        return _everything() if value.letter == "R" else None
    if isinstance(value, Joined):
        left, right = real_set(value.left), real_set(value.right)
        if left is None or right is None:
            return None
        if value.how == "union":
            return _union([*left, *right])
        return _intersection(left, _complement(right) if value.how == "difference" else right)
    if isinstance(value, Relation):
        return _relation(value)
    if isinstance(value, Many):
        return _many(value)
    return None


def surely_set(value: Value) -> bool:
    """Whether a value can be nothing but a set of reals: no pair of coordinates, no list of numbers."""
    if isinstance(value, Many):
        if value.kind in ("or", "and", "list"):
            return all(surely_set(item) for item in value.items)
        return value.kind in ("tuple", "square") and any(is_node(x) and infinite(x) for x in value.items)  # type: ignore[arg-type]
    if isinstance(value, Relation):
        return all(sign in ("<", ">", "<=", ">=", "!=") for sign in value.signs)
    return isinstance(value, Range | Joined | Reals)


def same(a: RealSet, b: RealSet) -> bool:
    return len(a) == len(b) and all(
        _equal(x.low, y.low) and _equal(x.high, y.high) and (x.low_open, x.high_closed) == (y.low_open, y.high_closed)
        for x, y in zip(a, b, strict=True)
    )


def _many(value: Many) -> RealSet | None:
    if value.kind in ("tuple", "square") and len(value.items) == 2 and all(is_node(x) for x in value.items):
        closed = value.kind == "square"
        return _interval(value.items[0], closed, value.items[1], closed)  # type: ignore[arg-type]
    if value.kind == "set":
        if not all(is_node(x) for x in value.items):
            return None
        points = [_point(x) for x in value.items]  # type: ignore[arg-type]
        return _union([Interval(x, False, x, True) for x in points])
    if value.kind in ("or", "and", "list"):
        parts = [real_set(item) for item in value.items]
        if any(part is None for part in parts) or len({variables(item) for item in value.items}) != 1:
            return None
        sets: list[RealSet] = parts  # type: ignore[assignment]
        either = _union([interval for part in sets for interval in part])
        if value.kind == "or" or not all(isinstance(item, Relation) for item in value.items):
            return either
        # "x > 1, x < 2" hold both; "x < 1, x > 2" cannot, and mean either
        return reduce(_intersection, sets) or either
    return None


def variables(value: Value) -> frozenset[str]:
    """The names that inequalities speak of."""
    if isinstance(value, Many):
        return frozenset().union(*(variables(item) for item in value.items))
    if isinstance(value, Joined):
        return variables(value.left) | variables(value.right)
    if isinstance(value, Relation):
        return frozenset().union(*(symbols(side) for side in value.sides if is_node(side)))  # type: ignore[arg-type]
    return frozenset()


def _relation(value: Relation) -> RealSet | None:
    """A chain of inequalities around one variable that stands alone."""
    if value.signs == ("in",) and isinstance(value.sides[0], Sym):
        return real_set(value.sides[1])
    if not all(is_node(side) for side in value.sides):
        return None
    found: RealSet = _everything()
    for left, sign, right in zip(value.sides, value.signs, value.sides[1:], strict=False):
        part = _comparison(left, sign, right)  # type: ignore[arg-type]
        if part is None:
            return None
        found = _intersection(found, part)
    return found if len(variables(value)) == 1 else None


def _comparison(left: Node, sign: str, right: Node) -> RealSet | None:
    if isinstance(right, Sym) and not symbols(left):
        left, right = right, left
        sign = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(sign, sign)
    if not isinstance(left, Sym) or symbols(right):
        return None
    point, (low, high) = _point(right), _ends()
    if sign == "!=":
        return _complement([Interval(point, False, point, True)])
    if sign in ("<", "<="):
        return [Interval(low, True, point, sign == "<=")]
    if sign in (">", ">="):
        return [Interval(point, sign == ">", high, False)]
    return [Interval(point, False, point, True)] if sign == "=" else None


def _interval(low: Node, low_closed: bool, high: Node, high_closed: bool) -> RealSet | None:
    if symbols(low) or symbols(high):
        return None
    a, b = _point(low), _point(high)
    if b < a or (_equal(a, b) and not (low_closed and high_closed)):
        return None
    return [Interval(a, not low_closed or bool(infinite(low)), b, high_closed and not infinite(high))]


def _point(node: Node) -> Point:
    if sign := infinite(node):
        return _ends()[(sign + 1) // 2]
    if symbols(node):
        raise Undefined("a bound depends on variables")
    evaluator = Evaluator(DIGITS)
    return evaluator.inexact(evaluator.real(evaluator(node)))


def _ends() -> tuple[Point, Point]:
    mp = Evaluator(DIGITS).mp
    return -mp.inf, mp.inf


def _everything() -> RealSet:
    low, high = _ends()
    return [Interval(low, True, high, False)]


def _equal(a: Point, b: Point) -> bool:
    if a == b:
        return True
    size = max(abs(a), abs(b))
    return bool(size != _ends()[1] and abs(a - b) <= 10 ** (-DIGITS // 2) * size)


def _union(parts: Sequence[Interval]) -> RealSet:
    """Disjoint, in order, and joined where they touch."""
    joined: list[Interval] = []
    for part in sorted(parts, key=lambda x: (x.low, x.low_open)):
        last = joined[-1] if joined else None
        touches = last is not None and (
            (_equal(part.low, last.high) and (last.high_closed or not part.low_open))
            or (part.low < last.high and not _equal(part.low, last.high))
        )
        if last is None or not touches:
            joined.append(part)
        elif _equal(part.high, last.high):
            joined[-1] = last._replace(high_closed=last.high_closed or part.high_closed)
        elif part.high > last.high:
            joined[-1] = last._replace(high=part.high, high_closed=part.high_closed)
    return joined


def _complement(parts: RealSet) -> RealSet:
    (low, high), found = _ends(), []
    open_ = True
    for part in parts:
        if part.low > low or (_equal(part.low, low) and not open_ and part.low_open):
            found.append(Interval(low, open_, part.low, part.low_open))
        low, open_ = part.high, part.high_closed
    if low != high:
        found.append(Interval(low, open_, high, False))
    return found


def _intersection(a: RealSet, b: RealSet) -> RealSet:
    return _complement(_union([*_complement(a), *_complement(b)]))
