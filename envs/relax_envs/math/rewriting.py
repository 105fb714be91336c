"""Answers written in short, written out: dots between numbers, names of several values, plus or minus."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from relax_envs.math.nodes import Apply, Many, Node, Num, Relation, Sym, Text, Value, mapped

LONGEST_PROGRESSION = 100
"""Numbers that dots may stand for."""


def filled(items: list[Value]) -> list[Value]:
    """``1, 2, ..., 9`` with what the dots stand for, where these are whole numbers at equal distances."""
    if items.count(Text("...")) != 1 or not 0 < (dots := items.index(Text("..."))) == len(items) - 2:
        return items
    known = [x.value for x in items if isinstance(x, Num) and x.value.denominator == 1]
    if len(known) != len(items) - 1:
        return items
    step = known[1] - known[0] if dots > 1 else Fraction(1)
    count = (known[-1] - known[0]) / step if step else Fraction(-1)
    if count.denominator != 1 or not 0 < count <= LONGEST_PROGRESSION:
        return items
    filled = [known[0] + i * step for i in range(count.numerator + 1)]
    return [Num(x) for x in filled] if filled[:dots] == known[:dots] else items


def by_name(left: Value, right: Value) -> Value | None:
    """``(x, y) = (1, 2)`` as ``(x = 1, y = 2)``; None for anything else."""
    if not (isinstance(left, Many) and isinstance(right, Many) and left.kind == right.kind == "tuple"):
        return None
    if len(left.items) != len(right.items) or not all(isinstance(x, Sym) for x in left.items):
        return None
    pairs = zip(left.items, right.items, strict=True)
    return Many("tuple", tuple(Relation(("=",), pair) for pair in pairs))


# --- plus or minus ----------------------------------------------------------------------------------------------------


def expanded(value: Value) -> Value:
    """With both values in the place of one with a sign ``±``."""
    if isinstance(value, Many) and value.kind in ("list", "or", "and", "set"):
        items: list[Value] = []
        for item in value.items:
            found = expanded(item)
            items += found.items if isinstance(found, Many) and found.kind == "or" and found is not item else [found]
        return Many(value.kind, tuple(items))
    plus, minus = _signed(value, 1), _signed(value, -1)
    return value if plus == minus else Many("or", (plus, minus))


def _signed(value: Value, sign: Literal[1, -1]) -> Value:
    def change(node: Node) -> Node:
        if not isinstance(node, Apply):
            return node
        args = tuple(change(arg) for arg in node.args)
        if node.name not in ("pm", "mp"):
            return Apply(node.name, args)
        up = (sign == 1) == (node.name == "pm")
        right = args[1] if up else Apply("neg", (args[1],))
        return right if args[0] == Num(Fraction(0)) else Apply("add", (args[0], right))

    return mapped(value, change)
