"""What an answer states about a name: ``x = 5`` says 5 of ``x``."""

from __future__ import annotations

from collections.abc import Sequence

from relax_envs.math import scalars
from relax_envs.math.nodes import (
    Apply,
    Many,
    Node,
    Quantity,
    Range,
    Relation,
    Sym,
    Value,
    has_decimal,
    is_node,
    nodes_in,
    symbols,
)
from relax_envs.math.policy import Policy, Unreadable


def stated(value: Value) -> tuple[str, Value]:
    """The name that an answer gives its value, or the empty string, and the value: ``x = 5``, ``5``, ``f(x) = x^2``.

    Of ``x = 12/3 = 4`` the value is the last one, of ``x = \\pi \\approx 3.14`` the exact one. Raises Unreadable for a
    chain that contradicts itself (``5 = 4``).
    """
    if not isinstance(value, Relation):
        return "", value
    if value.signs == ("in",) and isinstance(value.sides[0], Sym):
        return value.sides[0].name, _as_interval(value.sides[1])
    if any(sign not in ("=", "~") for sign in value.signs):
        return "", value
    sides = list(value.sides)
    if "~" in value.signs:
        kept = value.signs.index("~") + 1
        sides = sides[: max(kept, 2)] if _name(sides[0]) and kept == 1 else sides[:kept]
    name = ""
    while len(sides) > 1 and (found := _name(sides[0])) and not _mentions(sides[1:], found):
        name, sides = name or found, sides[1:]
    if len(sides) == 2 and not name and (found := _name(sides[1])) and not _mentions(sides[:1], found):
        name, sides = found, sides[:1]
    if len(sides) == 1:
        return name, sides[0]
    if all(is_node(number(side)) for side in sides):
        nodes: list[Node] = [number(side) for side in sides]  # type: ignore[misc]
        if not any(symbols(node) for node in nodes):
            last = _last_of_chain(nodes)
            return name, sides[-1] if last is nodes[-1] else last
        if all(scalars.equal(nodes[0], node, Policy()) for node in nodes[1:]):  # "x^2 - 1 = (x - 1)(x + 1)"
            return name, nodes[-1]
    return "", value


def _as_interval(value: Value) -> Value:
    """A set in which something lies: a pair is an open interval."""
    if isinstance(value, Many) and value.kind in ("tuple", "square") and len(value.items) == 2:
        low, high = value.items
        if is_node(low) and is_node(high):
            return Range(low, high, (value.kind == "square",) * 2)  # type: ignore[arg-type]
    return value


def _last_of_chain(sides: Sequence[Node]) -> Node:
    found = sides[0]
    for side in sides[1:]:
        if scalars.equal(found, side, Policy()):
            found = side
        elif not (has_decimal(side) and scalars.equal(found, side, Policy(tolerance=0.05))):
            raise Unreadable("it contradicts itself")
    return found


def _name(value: Value) -> str:
    """The name of a variable or a function of something, or the empty string."""
    if isinstance(value, Sym):
        return value.name
    if isinstance(value, Apply) and value.name == "call" and isinstance(value.args[0], Sym):
        return f"{value.args[0].name}()"
    return ""


def _mentions(sides: Sequence[Value], name: str) -> bool:
    return any(name.removesuffix("()") in symbols(node) for side in sides for node in nodes_in(side))


def same_name(a: str, b: str) -> bool:
    """``y`` may stand for ``f(x)``."""
    a, b = sorted((a.casefold(), b.casefold()), key=len)
    return a == b or (a == "y" and b.endswith("()"))


def number(value: Value) -> Value:
    return value.value if isinstance(value, Quantity) else value
