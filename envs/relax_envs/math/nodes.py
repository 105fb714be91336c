"""What the grammar makes of an answer: expressions with a value, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal


@dataclass(frozen=True, slots=True)
class Num:
    """``decimal``: written with a decimal point, so that it may stand for a rounded value."""

    value: Fraction
    decimal: bool = False


@dataclass(frozen=True, slots=True)
class Sym:
    name: str


@dataclass(frozen=True, slots=True)
class Const:
    name: Literal["pi", "e", "i", "inf"]


@dataclass(frozen=True, slots=True)
class Apply:
    """``name``: add, mul, div, pow, neg, root, fact, abs, percent, degree, pm, mp, sin, log ... of the arguments."""

    name: str
    args: tuple[Node, ...]


Node = Num | Sym | Const | Apply


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit: ``unit`` as ``units.py`` reads it."""

    value: Node
    unit: Unit


@dataclass(frozen=True, slots=True)
class Unit:
    """``factor`` times the product of the base units in ``powers`` (base, exponent), which are in order."""

    powers: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    letters: tuple[tuple[str, int], ...] = ()
    """Letters and powers, where the unit could be a product of variables, too: of ``m^2`` in ``5 m^2``."""


@dataclass(frozen=True, slots=True)
class Text:
    """Words in lower case."""

    words: str


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in another base than ten."""

    digits: str
    base: int


Kind = Literal["list", "or", "and", "tuple", "square", "set", "ratio"]


@dataclass(frozen=True, slots=True)
class Many:
    """Several answers, or one of several parts. ``square``: in square brackets, so an interval if there are two.

    ``list``: between commas without brackets; ``or`` and ``and``: so joined.
    """

    kind: Kind
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Range:
    low: Node
    high: Node
    closed: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Reals:
    """All real numbers, or another number set by its letter."""

    letter: str = "R"


@dataclass(frozen=True, slots=True)
class Joined:
    """``union``, ``intersection`` or ``difference`` of two sets."""

    how: Literal["union", "intersection", "difference"]
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain: ``sides[0] signs[0] sides[1] ...``; signs: = < > <= >= != in ~."""

    signs: tuple[str, ...]
    sides: tuple[Value, ...]


Value = Node | Quantity | Text | Based | Many | Range | Reals | Joined | Matrix | Relation

NODES = (Num, Sym, Const, Apply)


def is_node(value: Value) -> bool:
    return isinstance(value, NODES)


def mapped(value: Value, change: Callable[[Node], Node]) -> Value:
    """The answer with its outermost expressions changed."""
    if isinstance(value, NODES):
        return change(value)
    if isinstance(value, Quantity):
        return Quantity(change(value.value), value.unit)
    if isinstance(value, Range):
        return Range(change(value.low), change(value.high), value.closed)
    if isinstance(value, Matrix):
        return Matrix(tuple(tuple(change(x) for x in row) for row in value.rows))
    if isinstance(value, Joined):
        return Joined(value.how, mapped(value.left, change), mapped(value.right, change))
    if isinstance(value, Many):
        return Many(value.kind, tuple(mapped(item, change) for item in value.items))
    if isinstance(value, Relation):
        return Relation(value.signs, tuple(mapped(side, change) for side in value.sides))
    return value


def nodes_in(value: Value) -> Iterator[Node]:
    """The expressions of an answer, outermost ones only."""
    if isinstance(value, NODES):
        yield value
    elif isinstance(value, Quantity):
        yield value.value
    elif isinstance(value, Range):
        yield from (value.low, value.high)
    elif isinstance(value, Matrix):
        for row in value.rows:
            yield from row
    elif isinstance(value, Joined):
        yield from nodes_in(value.left)
        yield from nodes_in(value.right)
    elif isinstance(value, Many | Relation):
        for item in value.items if isinstance(value, Many) else value.sides:
            yield from nodes_in(item)


def symbols(node: Node) -> frozenset[str]:
    """The names of the variables in an expression."""
    if isinstance(node, Sym):
        return frozenset([node.name])
    if isinstance(node, Apply):
        return frozenset().union(*(symbols(arg) for arg in node.args))
    return frozenset()


def has_decimal(node: Node) -> bool:
    """Whether a decimal fraction is part of an expression."""
    if isinstance(node, Apply):
        return any(has_decimal(arg) for arg in node.args)
    return isinstance(node, Num) and node.decimal


def replaced(node: Node, names: dict[str, Node]) -> Node:
    """The expression with other expressions in the place of variables."""
    if isinstance(node, Sym):
        return names.get(node.name, node)
    if isinstance(node, Apply):
        return Apply(node.name, tuple(replaced(arg, names) for arg in node.args))
    return node


def negated(node: Node) -> Node:
    return Num(-node.value, node.decimal) if isinstance(node, Num) else Apply("neg", (node,))


def infinite(node: Node) -> int:
    """1 or -1 for plus or minus infinity, 0 for anything else."""
    if node == Const("inf"):
        return 1
    return -infinite(node.args[0]) if isinstance(node, Apply) and node.name == "neg" else 0
