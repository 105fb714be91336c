"""Collections against collections, element by element; ``same`` says whether two elements are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from relax_envs.math.nodes import Apply, Many, Num, Value, is_node
from relax_envs.math.policy import Order
from relax_envs.math.statements import same_name, stated

Same = Callable[[Value, Value], bool]
UNORDERED = ("list", "or", "and", "set")
ZERO = Num(Fraction(0))


def collections(gold: Many, answer: Many, order: Order, same: Same) -> bool:
    """Whether both hold the same: by names, in order or without one, as their brackets and ``order`` say."""
    kinds = {gold.kind, answer.kind}
    a, b = gold.items, answer.items
    if "ratio" in kinds:
        return len(kinds) == 1 and _ratios(a, b, same)
    named = [_names(gold), _names(answer)]
    if any(named) and order != "free":
        return _named(named, a, b, same)
    if "set" in kinds:
        return (order == "free" or not kinds & {"tuple", "square"}) and _as_sets(a, b, same)
    if order == "free" or (order == "kind" and kinds <= set(UNORDERED)):
        return _as_multisets(a, b, same)
    if kinds == {"tuple", "square"} and len(a) == 2:
        return False  # a pair and an interval
    return in_order(a, b, same)


def in_order(a: Sequence[Value], b: Sequence[Value], same: Same) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def _names(many: Many) -> list[str]:
    """The names that all elements have, where these tell them apart: not ``x = 1, x = 2``, nor ``x_1 = 1, x_2 = 2``."""
    names = [stated(item)[0] for item in many.items]
    stems = {name.partition("_")[0] for name in names}
    return names if all(names) and len(stems) == len(names) else []


def _named(named: Sequence[list[str]], a: Sequence[Value], b: Sequence[Value], same: Same) -> bool:
    """Elements with names: by these where both have them, else in order."""
    if len(a) != len(b):
        return False
    if all(named):
        b = [item for name in named[0] for item, other in zip(b, named[1], strict=True) if same_name(name, other)]
        return in_order(a, b, same)
    return in_order([stated(x)[1] for x in a], [stated(x)[1] for x in b], same)


def _ratios(a: Sequence[Value], b: Sequence[Value], same: Same) -> bool:
    if same(a[0], ZERO) or same(b[0], ZERO):
        return in_order(a, b, same)
    if len(a) != len(b) or not all(is_node(x) for x in (*a, *b)):
        return False
    return all(
        same(Apply("mul", (x, b[0])), Apply("mul", (y, a[0])))  # type: ignore[arg-type]
        for x, y in zip(a[1:], b[1:], strict=True)
    )


def _as_multisets(a: Sequence[Value], b: Sequence[Value], same: Same) -> bool:
    if len(a) != len(b):
        return False
    left = list(b)
    for x in a:
        place = next((i for i, y in enumerate(left) if same(x, y)), None)
        if place is None:
            return False
        del left[place]
    return True


def _as_sets(a: Sequence[Value], b: Sequence[Value], same: Same) -> bool:
    matched = [False] * len(a)
    for y in b:
        place = next((i for i, x in enumerate(a) if same(x, y)), None)
        if place is None:
            return False
        matched[place] = True
    return all(done or any(same(x, y) for y in b) for x, done in zip(a, matched, strict=True))
