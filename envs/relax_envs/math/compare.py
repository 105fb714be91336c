"""Whether an answer says what the gold says: same value, same elements, same unit, same words."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from relax_envs.math import elements, realsets, scalars, units
from relax_envs.math.nodes import (
    Apply,
    Based,
    Const,
    Joined,
    Many,
    Matrix,
    Node,
    Num,
    Quantity,
    Range,
    Reals,
    Relation,
    Sym,
    Text,
    Value,
    is_node,
    mapped,
    nodes_in,
    symbols,
)
from relax_envs.math.policy import Policy, Undefined
from relax_envs.math.statements import number, same_name, stated

RADIANS = (("radian", 1),)
_ARTICLES = ("a ", "an ", "the ")


def equal(gold: Value, answer: Value, policy: Policy) -> bool:
    """Whether the answer is right. Raises Undefined, Refused and Unreadable for an answer that is worth nothing."""
    if policy.percent == "either":
        return any(
            _equal(_percent(gold, g), _percent(answer, a), policy)
            for g, a in (("value", "value"), ("number", "number"), ("value", "number"), ("number", "value"))
        )
    return _equal(_percent(gold, policy.percent), _percent(answer, policy.percent), policy)


def check(gold: Value) -> None:
    """Raises Undefined, Refused or Unreadable for a gold that no answer could be compared with."""
    stated(gold)
    for node in nodes_in(gold):
        scalars.check(node)


def _equal(gold: Value, answer: Value, policy: Policy) -> bool:
    (gold_name, stated_gold), (name, stated_answer) = stated(gold), stated(answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if isinstance(stated_gold, Relation) != isinstance(stated_answer, Relation):
            return _relations(gold, answer, policy)  # "y = 2x + 1" and "2x - y + 1 = 0"
        if gold_name and name and not same_name(gold_name, name):
            return _relations(gold, answer, policy)  # "y = x" and "x = y"
    gold, answer = stated_gold, stated_answer
    if is_node(gold) and is_node(answer):
        if isinstance(gold, Sym) and isinstance(answer, Sym):
            return gold.name.casefold() == answer.name.casefold()
        return scalars.equal(gold, answer, policy)  # type: ignore[arg-type]
    if isinstance(gold, Quantity) or isinstance(answer, Quantity):
        return _quantities(gold, answer, policy)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return _based(gold, answer) or _based(answer, gold)
    if isinstance(gold, Text) or isinstance(answer, Text):
        return _words(gold) is not None and _words(gold) == _words(answer)
    if realsets.surely_set(gold) or realsets.surely_set(answer):
        return _sets(gold, answer, policy)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return isinstance(gold, Relation) and isinstance(answer, Relation) and _relations(gold, answer, policy)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(gold, answer, policy)
    return _collections(gold, answer, policy)


# --- numbers with something around them -------------------------------------------------------------------------------


def _percent(value: Value, how: str) -> Value:
    """With each percentage as its value, or as the number before the sign."""

    def change(node: Node) -> Node:
        if not isinstance(node, Apply):
            return node
        args = tuple(change(arg) for arg in node.args)
        return args[0] if node.name == "percent" else Apply(node.name, args)

    return mapped(value, change) if how == "number" else value


def _quantities(gold: Value, answer: Value, policy: Policy) -> bool:
    """Values of which one at least has a unit."""
    if policy.units == "ignore":
        return _equal(number(gold), number(answer), policy)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        if gold.unit.powers == answer.unit.powers:
            return scalars.equal(_scaled(gold), _scaled(answer), policy)
        if gold.unit.powers and answer.unit.powers:
            angles = {gold.unit.powers, answer.unit.powers} == {units.DEGREE.powers, RADIANS}
            return angles and scalars.equal(_in_radians(gold), _in_radians(answer), policy)
        return policy.units != "require" and scalars.equal(gold.value, answer.value, policy)
    measured, other = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
    if not isinstance(measured, Quantity) or not is_node(other):
        return False
    plain: Node = other  # type: ignore[assignment]
    if measured.unit.letters and symbols(plain):  # "2 m" may be the product of 2 and m
        return scalars.equal(_as_product(measured), plain, policy)
    if measured.unit == units.DEGREE and Const("pi") in _leaves(plain):
        return scalars.equal(_in_radians(measured), plain, policy)
    if policy.units == "require" and measured is gold and gold.unit.powers:
        return False
    if not measured.unit.powers and scalars.equal(_scaled(measured), plain, policy):
        return True
    return scalars.equal(measured.value, plain, policy)


def _as_product(quantity: Quantity) -> Node:
    """With the letters of the unit as variables."""
    factors: list[Node] = [quantity.value]
    for word, power in quantity.unit.letters:
        factors += [Apply("pow", (Sym(c), Num(Fraction(power)))) for c in word]
    return Apply("mul", tuple(factors))


def _leaves(node: Node) -> set[Node]:
    if isinstance(node, Apply):
        return set().union(*(_leaves(arg) for arg in node.args))
    return {node}


def _scaled(quantity: Quantity) -> Node:
    """In the base units."""
    if quantity.unit.factor == 1:
        return quantity.value
    return Apply("mul", (quantity.value, Num(quantity.unit.factor)))


def _in_radians(quantity: Quantity) -> Node:
    return Apply("degree", (quantity.value,)) if quantity.unit == units.DEGREE else quantity.value


def _based(a: Value, b: Value) -> bool:
    """Digits in a base, and the same digits with that base, or without one."""
    if not isinstance(a, Based):
        return False
    if isinstance(b, Based):
        return a == b
    return b == Num(Fraction(int(a.digits))) if a.digits.isdigit() else False


def _words(value: Value) -> str | None:
    """Words as they are compared; letters that are multiplied spell one, too."""
    if isinstance(value, Text):
        words = value.words
        for article in _ARTICLES:
            words = words.removeprefix(article)
        return words
    if isinstance(value, Apply) and value.name == "mul" and all(isinstance(x, Sym | Const) for x in value.args):
        return "".join(x.name for x in value.args).casefold()  # type: ignore[union-attr]
    return None


# --- sets, relations, matrices ----------------------------------------------------------------------------------------


def _sets(gold: Value, answer: Value, policy: Policy) -> bool:
    names = [{name.casefold() for name in realsets.variables(value)} for value in (gold, answer)]
    if all(names) and names[0] != names[1]:
        return False  # "x < 3" and "y < 3"
    try:
        a, b = realsets.real_set(gold), realsets.real_set(answer)
    except Undefined:
        a = b = None
    if a is not None and b is not None:
        return realsets.same(a, b)
    if isinstance(gold, Range) and isinstance(answer, Range):
        ends = ([gold.low, gold.high], [answer.low, answer.high])
        return gold.closed == answer.closed and scalars.all_equal(*ends, policy)
    if isinstance(gold, Joined) and isinstance(answer, Joined) and gold.how == answer.how:
        pairs = [(answer.left, answer.right)]
        pairs += [] if gold.how == "difference" else [(answer.right, answer.left)]
        return any(_equal(gold.left, x, policy) and _equal(gold.right, y, policy) for x, y in pairs)
    if isinstance(gold, Reals) or isinstance(answer, Reals):
        return gold == answer
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _relations(gold, answer, policy)
    if isinstance(gold, Many) and isinstance(answer, Many):
        return _collections(gold, answer, policy)
    return False


def _relations(gold: Relation, answer: Relation, policy: Policy) -> bool:
    """Chains, link by link: both sides moved to one, up to a factor."""
    a, b = _links(gold), _links(answer)
    if a is None or b is None:
        return gold.signs == answer.signs and all(
            _equal(x, y, policy) for x, y in zip(gold.sides, answer.sides, strict=True)
        )
    if len(a) != len(b):
        return False
    return all(
        s == t and scalars.proportional(x, y, positive=s in ("<", "<="))
        for (s, x), (t, y) in zip(sorted(a, key=_sign), sorted(b, key=_sign), strict=True)
    )


def _sign(link: tuple[str, Node]) -> str:
    return link[0]


def _links(relation: Relation) -> list[tuple[str, Node]] | None:
    """Each link as a sign of =, !=, <, <= and what is compared with 0 by it; None where it is no such comparison."""
    found: list[tuple[str, Node]] = []
    for left, sign, right in zip(relation.sides, relation.signs, relation.sides[1:], strict=False):
        if not is_node(left) or not is_node(right) or sign not in ("=", "!=", "<", "<=", ">", ">="):
            return None
        if sign in (">", ">="):
            left, right, sign = right, left, sign.replace(">", "<")
        found.append((sign, Apply("add", (left, Apply("neg", (right,))))))  # type: ignore[arg-type]
    return found


def _matrices(gold: Value, answer: Value, policy: Policy) -> bool:
    """Matrices of the same shape; a single row or column may be written as a tuple."""
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return len(gold.rows) == len(answer.rows) and all(
            scalars.all_equal(g, a, policy) for g, a in zip(gold.rows, answer.rows, strict=True)
        )
    matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    assert isinstance(matrix, Matrix)
    if isinstance(other, Many) and (written := _as_matrix(other)):
        return _matrices(matrix, written, policy)
    if not isinstance(other, Many) or other.kind not in ("tuple", "square"):
        return len(matrix.rows) == 1 == len(matrix.rows[0]) and _equal(matrix.rows[0][0], other, policy)
    if 1 not in (len(matrix.rows), len(matrix.rows[0])):
        return False
    flat = [x for row in matrix.rows for x in row]
    return elements.in_order(flat, other.items, partial(_equal, policy=policy))


def _as_matrix(rows: Many) -> Matrix | None:
    """``[[1, 2], [3, 4]]``."""
    found = [row.items for row in rows.items if isinstance(row, Many) and row.kind == rows.kind]
    if rows.kind != "square" or len(found) < len(rows.items) or len({len(row) for row in found}) != 1:
        return None
    return Matrix(tuple(found)) if all(is_node(x) for row in found for x in row) else None  # type: ignore[arg-type]


# --- collections ------------------------------------------------------------------------------------------------------


def _collections(gold: Value, answer: Value, policy: Policy) -> bool:
    if isinstance(gold, Many) and isinstance(answer, Many):
        return elements.collections(gold, answer, policy.order, partial(_equal, policy=policy))
    return _single(gold, answer, policy)


def _single(gold: Value, answer: Value, policy: Policy) -> bool:
    """A collection against something else: a set of one element is that element, and a ratio is a quotient."""
    many, other = (gold, answer) if isinstance(gold, Many) else (answer, gold)
    if not isinstance(many, Many):
        return gold == answer
    if many.kind == "ratio" and len(many.items) == 2 and is_node(other):
        top, bottom = many.items
        return _equal(Apply("mul", (top, Apply("inv", (bottom,)))), other, policy)  # type: ignore[arg-type]
    if len(many.items) != 1:
        return False
    return _equal(*((many.items[0], other) if many is gold else (other, many.items[0])), policy)
