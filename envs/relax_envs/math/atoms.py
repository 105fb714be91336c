"""Commands with arguments: functions, fractions, roots, matrices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from relax_envs.math.nodes import Apply, Const, Many, Matrix, Node, Num, Sym, Value, negated
from relax_envs.math.policy import Foreign, Unreadable
from relax_envs.math.vocabulary import ARGUMENTS, CONSTANTS, FUNCTIONS, INVERSES

if TYPE_CHECKING:
    from relax_envs.math.expressions import Expressions

_NAME = re.compile(r"[A-Za-z]+")
_DERIVATIVE = re.compile(r"\s*\{\s*d[a-zA-Z]?\s*\}\s*\{\s*d\s?[a-zA-Z]")
_BASE = re.compile(r"\d{1,9}(?=\s*[({\\])|\d")
_OVER = re.compile(r"\s*/\s*(\d{1,6})(?![\d.])")
_ENVIRONMENT = re.compile(r"\\begin\s*\{(?:[pbB]?matrix|smallmatrix|array)\}(?:\s*\{[lcr| ]*\})?")
_END = re.compile(r"\\end\s*\{[a-zA-Z]+\}")
_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")


def fraction(r: Expressions) -> Node:
    if _DERIVATIVE.match(r.s, r.i):
        raise Foreign("a derivative")
    top, bottom = r.argument(), r.argument()
    return Apply("mul", (top, Apply("inv", (bottom,))))


def root(r: Expressions) -> Node:
    index: Node = Num(Fraction(2))
    r.inner += 1
    if r.take("["):
        index = r.node(r.sum())
        r.need("]")
    value = r.node(r.atom())
    r.inner -= 1
    return Apply("root", (value, index))


def function(r: Expressions, name: str) -> Node:
    """A function with its exponent, its base and its arguments, in brackets or not: ``\\sin^2 2x``."""
    r.enter()
    r.inner += 1
    exponent: Node | None = None
    base: Node | None = None
    while True:
        if r.take("^"):
            exponent = r.exponent()
        elif name == "log" and r.take("_"):
            base = _base(r)
        else:
            break
    inverse = exponent == Num(Fraction(-1)) and f"a{name}" in INVERSES
    args = _arguments(r)
    r.inner -= 1
    r.depth -= 1
    if name == "log" and len(args) == 2 and base is None:
        base = args[1]
        args = args[:1]
    least, most = ARGUMENTS.get(name, (1, 1))
    if not least <= len(args) <= most:
        raise Unreadable(f"{name} of {len(args)} arguments in {r.s[:60]!r}")
    if name == "cbrt":
        value: Node = Apply("root", (args[0], Num(Fraction(3))))
    elif name == "lg":
        value = Apply("log", (args[0], Num(Fraction(10))))
    else:
        value = Apply(f"a{name}" if inverse else name, tuple(args) if base is None else (*args, base))
    return value if exponent is None or inverse else Apply("pow", (value, exponent))


def _base(r: Expressions) -> Node:
    """The base of a logarithm: of ``\\log_28`` it is 2, but of ``log_10(5)`` all digits before the bracket."""
    c = r.peek()
    if c == "{":
        return r.node(r.group())
    if found := _BASE.match(r.s, r.i):
        r.i = found.end()
        return Num(Fraction(int(found[0])))
    if c.isascii() and c.isalpha():
        r.i += 1
        return CONSTANTS.get(c) or Sym(c)
    return r.node(r.atom())


def _arguments(r: Expressions) -> Sequence[Node]:
    """What stands in the bracket behind a function, or all factors up to the next function, sum or fraction."""
    if r.peek() in ("(", "[") or r.s.startswith(r"\{", r.i):
        value = r.bracket()
        return [r.node(x) for x in value.items] if isinstance(value, Many) else [r.node(value)]
    sign = r.take("-")
    factors: list[Value] = [r.node(r.power())]
    while r.more(factors[-1]) and not _at_function(r):
        factors.append(r.node(r.power()))
    if Const("pi") in factors and (found := _OVER.match(r.s, r.i)):  # "\sin \pi/6"
        r.i = found.end()
        factors.append(Apply("inv", (Num(Fraction(int(found[1]))),)))
    value = r.node(r.times(factors))
    return [negated(value) if sign else value]


def _at_function(r: Expressions) -> bool:
    found = _NAME.match(r.s, r.i)
    word = found[0] if found else r.command()
    return word in FUNCTIONS or (found is not None and word == "sqrt")


def matrix(r: Expressions) -> Value:
    found = _ENVIRONMENT.match(r.s, r.i)
    if found is None:
        raise Foreign("an environment")
    r.i = found.end()
    r.enter()
    r.inner += 1
    rows: list[list[Node]] = [[]]
    while not (end := _END.match(r.s, r.i)):
        rows[-1].append(r.node(r.sum()))
        if r.take("&"):
            continue
        r.skip()
        if row := _ROW.match(r.s, r.i):
            r.i = row.end()
            r.skip()
            if not _END.match(r.s, r.i):
                rows.append([])
        elif not _END.match(r.s, r.i):
            raise r.unreadable()
    r.i = end.end()
    r.inner -= 1
    r.depth -= 1
    if not rows[0] or len({len(row) for row in rows}) != 1:
        raise Unreadable(f"the rows of the matrix in {r.s[:60]!r} are not equally long")
    return Matrix(tuple(tuple(row) for row in rows))
