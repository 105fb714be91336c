"""From the text of an answer to what it says: numbers, units, tuples, sets, intervals, relations, words."""

from __future__ import annotations

import re

from relax_envs.math import units
from relax_envs.math.expressions import Expressions
from relax_envs.math.nodes import (
    Apply,
    Joined,
    Many,
    Node,
    Quantity,
    Range,
    Reals,
    Relation,
    Text,
    Unit,
    Value,
    is_node,
)
from relax_envs.math.phrases import only_words, prose
from relax_envs.math.policy import Foreign, Policy, Refused, Unreadable
from relax_envs.math.rewriting import by_name, expanded, filled
from relax_envs.math.text import plain

_SIGNS = (
    *((r"\le", "<="), (r"\ge", ">="), (r"\ne", "!="), (r"\approx", "~"), (r"\equiv", "equiv"), (r"\in", "in")),
    *(("<=", "<="), (">=", ">="), ("!=", "!="), ("==", "="), (":=", "="), ("=<", "<="), ("~", "~"), (r"\sim", "~")),
    *(("<", "<"), (">", ">"), ("=", "="), ("in", "in"), (r"\to", "="), ("->", "=")),
)
_SEPARATOR = re.compile(
    r"\s*(?:(?P<comma>[,;])\s*)?(?:(?P<word>and|or|\\lor|\\land|&)(?![A-Za-z])|\\text\{\s*,?\s*(?P<text>and|or|,|;)\s*,?\s*\})?"
)
_ABOUT = re.compile(r"\s*(?:(?:\\text\{\s*)?(?:about|approximately|exactly|roughly)\s*\}?|\\approx|~)\s*")
_MODULUS = re.compile(r"\s*(?:\\p?mod\s*\{?|\(\s*(?:\\bmod|\\mod|mod|\\text\{\s*mod\s*\})|\\bmod|mod\b)\s*")
_TEXT_MARKS = re.compile(r"\\text\{([^{}]*)\}")

_SCALE = re.compile(r"\s*(?:\\text\{\s*)?([CF])(?![A-Za-z])\}?")
_CURRENCY = re.compile(rf"\s*(-?)\s*([{units.CURRENCIES}])")


def read(text: str, policy: Policy) -> Value:
    """What an answer says.

    Raises Unreadable for what is no answer, Foreign for what only math-verify may be able to read, Refused for what
    exceeds the limits. Nothing is evaluated.
    """
    try:
        spelled = plain(text, policy)
        if not spelled:
            raise Unreadable("it is empty")
        if (whole := _TEXT_MARKS.fullmatch(spelled)) and re.search(r"\d", whole[1]):
            spelled = whole[1].strip()  # "\text{5 cm}"
        if (words := only_words(spelled)) is not None:
            return words
        try:
            return expanded(Reader(spelled, policy).whole())
        except Foreign:
            raise
        except Unreadable:
            if (said := prose(spelled)) is not None:
                return said
            raise
    except RecursionError:
        raise Refused("it is nested too deep") from None


class Reader(Expressions):
    """The grammar of whole answers."""

    def whole(self) -> Value:
        value = self.several("")
        self.skip()
        if self.i < len(self.s) or value == Text("..."):
            raise self.unreadable()
        return value

    def several(self, closing: str) -> Value:
        """Answers between commas, ``and``, ``or``, up to ``closing``; a single one is returned as it is."""
        self.enter()
        items = [self.item()]
        kinds: set[str] = set()
        while self.i < len(self.s) and not (closing and self.s.startswith(closing, self.i)):
            found = _SEPARATOR.match(self.s, self.i)
            if found is None or not found[0].strip():
                break
            self.i = found.end()
            kinds.add(found["word"] or found["text"] or "list")
            items.append(self.item())
        self.depth -= 1
        if len(items) == 1:
            return items[0]
        items = filled(items)
        return Many("or" if kinds & {"or", r"\lor"} else "and" if kinds & {"and", r"\land"} else "list", tuple(items))

    def item(self) -> Value:
        """One answer: a set, a value with its unit, or a chain of relations between such; or dots between two."""
        if self.take("..."):
            return Text("...")
        if found := _ABOUT.match(self.s, self.i):
            self.i = found.end()
        sides = [self.operand()]
        signs: list[str] = []
        while sign := self.sign():
            signs.append(sign)
            sides.append(self.operand())
        if found := _MODULUS.match(self.s, self.i):
            self.i = found.end()
            signs.append("mod")
            sides.append(self.sum())
            self.take("}", ")")
        if signs == ["="] and (parts := by_name(*sides)) is not None:
            return parts
        return Relation(tuple(signs), tuple(sides)) if signs else sides[0]

    def sign(self) -> str:
        if self.bars or not self.peek():
            return ""
        for spelled, sign in _SIGNS:
            if self.take(spelled):
                return sign
        return ""

    def operand(self) -> Value:
        """Sets joined by their signs, or a value with its unit."""
        value = self.measured()
        while True:
            if self.take(r"\cup", "union", "U"):
                value = Joined("union", value, self.measured())
            elif self.take(r"\cap"):
                value = Joined("intersection", value, self.measured())
            elif self.take(r"\setminus"):
                value = Joined("difference", value, self.measured())
            else:
                return value

    def measured(self) -> Value:
        """A value with the unit before or behind it, or a ratio."""
        negative, money = self.currency()
        value = self.sum()
        if self.peek() == ":" and is_node(value) and not self.conditional and not self.s.startswith(":=", self.i):
            parts: list[Value] = [value]
            while self.take(":"):
                parts.append(self.node(self.sum()))
            return Many("ratio", tuple(parts))
        if not is_node(value):
            return value
        number: Node = value  # type: ignore[assignment]
        unit = money
        if isinstance(number, Apply) and number.name == "degree":
            number, unit = number.args[0], units.DEGREE
            if scale := _SCALE.match(self.s, self.i):
                self.i, unit = scale.end(), units.temperature(scale[1])
        elif not self.inner and (found := units.read(self.s, self.i)) and self.at_unit(number):
            unit, self.i = found
        if negative:
            number = self.node(self.minus(number))
        return number if unit is None else Quantity(number, unit)

    def currency(self) -> tuple[bool, Unit | None]:
        """Whether there is a minus before a sign of currency, and the currency."""
        found = _CURRENCY.match(self.s, self.i)
        if found is None:
            return False, None
        self.i = found.end()
        return bool(found[1]), units.single(found[2])

    # --- brackets -----------------------------------------------------------------------------------------------------

    def bracket(self) -> Value:
        opening = self.take("(", "[", r"\{", r"\langle", "]", "<")
        if not opening:
            raise self.unreadable()
        self.enter()
        self.bracketed += 1
        bars, self.bars = self.bars, 0
        inner = self.inner
        self.inner += opening in ("(", "[") and self.bracketed > 1  # a whole answer in brackets may have units
        conditional, self.conditional = self.conditional, opening == r"\{"
        value = self.braces() if opening == r"\{" else self.pair(opening)
        self.inner, self.bars, self.conditional = inner, bars, conditional
        self.bracketed -= 1
        self.depth -= 1
        return value

    def pair(self, opening: str) -> Value:
        """What stands in round, square or angle brackets: a value, a tuple or an interval."""
        if self.take(")") and opening == "(":
            raise Unreadable("an empty pair of brackets")
        items = self.items()
        closing = self.take(")", "]", r"\rangle", "[", ">")
        if not closing:
            raise self.unreadable()
        matching = {"(": ")", "[": "]", r"\langle": r"\rangle", "<": ">"}.get(opening) == closing
        if len(items) == 1 and matching:
            return items[0]
        if matching:
            return Many("square" if opening == "[" else "tuple", tuple(items))
        if len(items) == 2 and opening + closing in ("(]", "[)", "][", "]]", "[[", "](", ")["):
            return Range(self.node(items[0]), self.node(items[1]), (opening == "[", closing == "]"))
        raise self.unreadable()

    def items(self) -> list[Value]:
        items = [self.item()]
        while self.take(",", ";"):
            items.append(self.item())
        return items

    def braces(self) -> Value:
        """A set by its elements, or by a condition on them."""
        if self.take(r"\}"):
            return Many("set", ())
        items = self.items()
        if len(items) == 1 and self.take("|", ":"):
            condition = self.several(r"\}")
            self.need(r"\}")
            return self.built(items[0], condition)
        self.need(r"\}")
        return Many("set", tuple(filled(items)))

    def built(self, element: Value, condition: Value) -> Value:
        if isinstance(element, Relation) and element.signs == ("in",):
            domain = element.sides[1]
            return condition if domain == Reals() else Joined("intersection", domain, condition)
        return condition

    def inside(self) -> Value:
        value = self.several("}")
        if isinstance(value, Many) and value.kind == "list" and self.depth > 1:
            return Many("set", value.items)
        return value
