"""Whether two expressions have the same value: exactly, then, if that is asked for, within a tolerance."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from relax_envs.math.evaluate import Evaluator, Number
from relax_envs.math.nodes import Apply, Const, Node, Sym, has_decimal, infinite, replaced, symbols
from relax_envs.math.policy import Policy, Refused, Undefined

DIGITS, MOST_DIGITS = 60, 4000
"""Of values that are not exact. A comparison takes as many as tell the largest from the smallest number in it; values
that only more of them could tell apart are not equal."""
LEEWAY = 20
"""Digits that rounding may take away."""
VARIABLES = 12
POINTS = 6
"""Where expressions in variables are compared: two with positive values, two with negative ones, two mixed."""


def equal(gold: Node, answer: Node, policy: Policy) -> bool:
    """Whether both have the same value; with variables: at random points, wherever both are real.

    Fractions are compared exactly, others to many more digits than they could agree in by accident. ``\\log`` without a
    base has the base 10 or e, the same one on both sides. Raises Undefined and Refused.
    """
    if gold == answer:
        return True
    if infinite(gold) or infinite(answer):
        return infinite(gold) == infinite(answer)
    answer = _with_constants(answer, gold)
    bases = (None, 10) if _has_bare_log(gold) or _has_bare_log(answer) else (None,)
    names = symbols(gold) | symbols(answer)
    if len(names) > VARIABLES:
        raise Refused(f"it has more than {VARIABLES} variables")
    for base in bases:
        if not names:
            if _constants_equal(gold, answer, base, policy.tolerance):
                return True
        elif _equal_at_points(gold, answer, names, base) or _equal_in_lower_case(gold, answer, base):
            return True
    return False


def check(node: Node) -> None:
    """Raises Undefined or Refused where an expression has no value, or one that is too large."""
    if infinite(node):
        return
    names = symbols(node)
    if len(names) > VARIABLES:
        raise Refused(f"it has more than {VARIABLES} variables")
    if not names:
        Evaluator(DIGITS)(node)
        return
    if all(_value(Evaluator(DIGITS, _point(names, i)), node) is None for i in range(POINTS)):
        raise Undefined("it has no value")


def proportional(a: Node, b: Node, positive: bool) -> bool:
    """Whether ``a`` is ``b`` times a number other than 0, positive if it must be: ``a = 0`` then says ``b = 0``."""
    names = symbols(a) | symbols(b)
    if not names or symbols(a) != symbols(b):
        return False
    ratio = None
    for i in range(POINTS):
        point = _point(names, i)
        evaluator = Evaluator(DIGITS, point)
        x, y = _value(evaluator, a), _value(evaluator, b)
        if x is None or y is None or x == 0 or y == 0:
            continue
        with evaluator.mp.workdps(DIGITS):
            found = evaluator.both(x, y, lambda a, b: a / b)
        if isinstance(found, evaluator.mp.mpc) or (positive and found < 0):
            return False
        if ratio is not None and not _close(evaluator, found, ratio, int(evaluator.mp.mag(evaluator.inexact(ratio)))):
            return False
        ratio = found
    return ratio is not None


def _with_constants(answer: Node, gold: Node) -> Node:
    """``I`` and ``E`` as computer algebra writes i and e, unless the gold has variables of that name."""
    names = symbols(answer) - symbols(gold)
    constants: dict[str, Node] = {"I": Const("i"), "E": Const("e")}
    return replaced(answer, {n: c for n, c in constants.items() if n in names}) if names & {"I", "E"} else answer


# --- at one point -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pair:
    """The values of both, whether they agree, and the evaluator of the last digits."""

    gold: Number
    answer: Number
    agree: bool
    evaluator: Evaluator

    def real(self) -> tuple[bool, bool]:
        return _is_real(self.evaluator, self.gold), _is_real(self.evaluator, self.answer)


def _pair(gold: Node, answer: Node, values: Mapping[str, Fraction], log: int | None) -> _Pair:
    """Both evaluated, with so many digits that rounding of the largest number in them cannot hide the smallest one.

    Where that takes too many digits they do not agree. Raises Undefined and Refused.
    """
    digits = DIGITS
    while True:
        evaluator = Evaluator(digits, values, log)
        a = evaluator(gold)
        low, high = evaluator.span
        evaluator.work = 0
        b = evaluator(answer)
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return _Pair(a, b, a == b, evaluator)
        low, high = min(low, evaluator.span[0]), max(high, evaluator.span[1])
        agree = _close(evaluator, a, b, high)
        needed = 2 * LEEWAY + math.ceil((high - low) * math.log10(2))
        if not agree or needed <= digits or needed > MOST_DIGITS:
            return _Pair(a, b, agree and needed <= digits, evaluator)
        digits = needed


def _close(evaluator: Evaluator, a: Number, b: Number, high: int) -> bool:
    """Whether two values differ by no more than rounding does to numbers below 2^high; fractions: at all."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    mp = evaluator.mp
    with mp.workdps(evaluator.digits):
        least = mp.ldexp(mp.mpf(10) ** -(evaluator.digits - LEEWAY), high)
        return bool(abs(evaluator.inexact(a) - evaluator.inexact(b)) <= least)


def _constants_equal(gold: Node, answer: Node, log: int | None, tolerance: float) -> bool:
    found = _pair(gold, answer, {}, log)
    if found.agree or not tolerance or not (has_decimal(gold) or has_decimal(answer)):
        return found.agree
    a, b = (found.evaluator.inexact(x) for x in (found.gold, found.answer))
    return bool(abs(a - b) <= tolerance * abs(a))


# --- variables --------------------------------------------------------------------------------------------------------


def _equal_at_points(gold: Node, answer: Node, names: Iterable[str], log: int | None) -> bool:
    real = other = 0
    for i in range(POINTS):
        try:
            found = _pair(gold, answer, _point(names, i), log)
        except Undefined:
            continue
        both = found.real()
        if both[0] != both[1]:
            continue  # a logarithm or a root, where only one of them is a real number
        if not found.agree:
            return False
        real, other = real + both[0], other + (not both[0])
    return real > 1 or (real == 0 and other > 1)


def _equal_in_lower_case(gold: Node, answer: Node, log: int | None) -> bool:
    """Whether they are equal but for capital letters, where no two variables of one differ in these alone."""
    lowered = []
    for node in (gold, answer):
        names = symbols(node)
        lower = {name: name.casefold() for name in names}
        if len(set(lower.values())) != len(names):
            return False
        lowered.append((replaced(node, {n: Sym(low) for n, low in lower.items()}), frozenset(lower.values())))
    (a, in_a), (b, in_b) = lowered
    return in_a == in_b and (a, b) != (gold, answer) and _equal_at_points(a, b, in_a, log)


def _value(evaluator: Evaluator, node: Node) -> Any:
    """The value at the evaluator's point; None where there is none."""
    try:
        return evaluator(node)
    except Undefined:
        return None


def _is_real(evaluator: Evaluator, value: Number) -> bool:
    try:
        evaluator.real(value)
    except Undefined:
        return False
    return True


def _point(names: Iterable[str], number: int) -> dict[str, Fraction]:
    """The values of the variables at a point: fractions without a pattern, always the same ones."""
    values = {}
    for i, name in enumerate(sorted(names)):
        digest = hashlib.sha256(f"{name} {number}".encode()).digest()
        value = Fraction(2 * int.from_bytes(digest[:2], "big") + 1, 1 << (14 + number % 2 * 2))
        negative = number in (2, 3) or (number > 3 and (digest[2] + i) % 2 == 0)
        values[name] = -value if negative else value
    return values


def _has_bare_log(node: Node) -> bool:
    if not isinstance(node, Apply):
        return False
    return (node.name == "log" and len(node.args) == 1) or any(_has_bare_log(arg) for arg in node.args)


def all_equal(gold: Sequence[Node], answer: Sequence[Node], policy: Policy) -> bool:
    return len(gold) == len(answer) and all(equal(g, a, policy) for g, a in zip(gold, answer, strict=True))
