"""The grammar of expressions: sums, products, powers, functions, in LaTeX and in plain text. Nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from relax_envs.math import atoms, names, numerals, units
from relax_envs.math.nodes import Apply, Many, Matrix, Node, Num, Reals, Value, is_node, negated
from relax_envs.math.policy import Foreign, Policy, Refused, Unreadable
from relax_envs.math.vocabulary import BRACKETS, CONSTANTS, DECORATIONS, FOREIGN, FUNCTIONS, GREEK, JOINING

_NAME = re.compile(r"[A-Za-z]+")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_MIXED = re.compile(r"\s+(\d{1,9})\s*/\s*(\d{1,9})(?![\d.,]*\d)")
_FACTORS = frozenset((*FUNCTIONS, *GREEK, *CONSTANTS, *BRACKETS, *DECORATIONS, "frac", "sqrt", "binom", "begin"))
"""Commands before which a sign of multiplication may be left out."""
_PERCENT = re.compile(r"\s*(?:%|(?:percent|per cent)\b|\\text\{\s*(?:percent|per cent|%)\s*\})")
_NUMBER_SET = re.compile(r"\s*\{?([RQZNC])\}?")
_CIRCLE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")


class Expressions:
    """Reads at ``self.i`` of ``self.s``, a text in ``plain`` spelling; every method leaves it behind what it read."""

    def __init__(self, text: str, policy: Policy) -> None:
        self.s, self.policy, self.i = text, policy, 0
        self.depth = 0
        self.bracketed = 0
        """How many brackets are open that might hold a tuple; braces of LaTeX start anew."""
        self.inner = 0
        """How many arguments, exponents and the like are open: no units in these."""
        self.bars = 0
        """How many ``|`` are open."""
        self.conditional = False
        """Whether a ``|`` may stand between the elements of a set and the condition on them."""

    # --- characters ---------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        while self.i < len(self.s) and self.s[self.i] == " ":
            self.i += 1

    def peek(self) -> str:
        """The next character that is no space, or the empty string."""
        self.skip()
        return self.s[self.i : self.i + 1]

    def take(self, *words: str) -> str:
        """The first of the words that comes next, taken; or the empty string. A command ends where its letters end."""
        self.skip()
        for word in words:
            if self.s.startswith(word, self.i):
                end = self.i + len(word)
                if word[-1].isalpha() and self.s[end : end + 1].isalpha():
                    continue
                self.i = end
                return word
        return ""

    def need(self, word: str) -> None:
        if not self.take(word):
            raise Unreadable(f"{word!r} is missing at {self.s[self.i : self.i + 20]!r} of {self.s[:60]!r}")

    def command(self) -> str:
        """The name of the command that comes next, not taken; or the empty string."""
        found = _COMMAND.match(self.s, self.i) if self.peek() == "\\" else None
        return found[1] if found else ""

    def name(self) -> str:
        """The letters that come next, not taken; or the empty string."""
        found = _NAME.match(self.s, self.i)
        return found[0] if found else ""

    def unreadable(self) -> Unreadable:
        if self.command() in FOREIGN:
            return Foreign(f"\\{self.command()}")
        return Unreadable(f"{self.s[self.i : self.i + 20]!r} of {self.s[:60]!r} cannot be read")

    def enter(self) -> None:
        self.depth += 1
        if self.depth > 10 + 4 * self.policy.deepest:  # a bracket counts up to four times
            raise Refused(f"it is nested more than {self.policy.deepest} deep")

    # --- sums, products, powers ---------------------------------------------------------------------------------------

    def sum(self) -> Value:
        self.enter()
        total = [self.term()]
        while sign := self.take("+/-", "+", "-", r"\pm", r"\mp"):
            right = self.term()
            if sign == "+":
                total.append(right)
            elif sign == "-":
                total.append(self.minus(right))
            else:
                pair = (self.node(self.plus(total)), self.node(right))
                total = [Apply("mp" if sign == r"\mp" else "pm", pair)]
        self.depth -= 1
        return self.plus(total)

    def plus(self, parts: list[Value]) -> Value:
        return parts[0] if len(parts) == 1 else Apply("add", tuple(self.node(part) for part in parts))

    def minus(self, value: Value) -> Value:
        if isinstance(value, Matrix):
            return Matrix(tuple(tuple(negated(x) for x in row) for row in value.rows))
        return negated(self.node(value))

    def node(self, value: Value) -> Node:
        """The value, if it is one that can be calculated with."""
        if not is_node(value):
            raise Unreadable(f"{self.s[:60]!r} calculates with what is no number")
        return value  # type: ignore[return-value]

    def term(self) -> Value:
        sign = ""
        while mark := self.take("-", "+", r"\pm", r"\mp"):
            if mark == "-":
                sign = {"": "-", "-": ""}.get(sign, sign)
            elif mark != "+":
                sign = mark
        value = self.product()
        if sign == "-":
            return self.minus(value)
        if sign:
            return Apply("mp" if sign == r"\mp" else "pm", (Num(Fraction(0)), self.node(value)))
        return value

    def product(self) -> Value:
        factors = [self.power()]
        while True:
            if self.take("*", r"\times", r"\cdot"):
                factors.append(self.signed_power())
            elif self.take("/"):
                factors.append(Apply("inv", (self.node(self.signed_power()),)))
            elif found := _PERCENT.match(self.s, self.i):
                self.i = found.end()
                factors = [Apply("percent", (self.node(self.times(factors)),))]  # "1/2%" is half a percent
            elif self.more(factors[-1]):
                factors.append(self.power())
            else:
                return self.times(factors)

    def signed_power(self) -> Value:
        return self.minus(self.power()) if self.take("-") else self.power()

    def times(self, factors: list[Value]) -> Value:
        if len(factors) == 1:
            return factors[0]
        matrices = [f for f in factors if isinstance(f, Matrix)]
        numbers = [self.node(f) for f in factors if not isinstance(f, Matrix)]
        if not matrices:
            return Apply("mul", tuple(numbers))
        if len(matrices) > 1:
            raise Foreign("a product of matrices")
        return Matrix(tuple(tuple(Apply("mul", (*numbers, x)) for x in row) for row in matrices[0].rows))

    def more(self, before: Value) -> bool:
        """Whether the next thing is multiplied without a sign: neither a number, nor a unit, nor a word that joins."""
        c = self.peek()
        if not c or not (is_node(before) or isinstance(before, Matrix)):
            return False
        if names.is_letter(c):
            word = self.name()
            scale = word in ("C", "F") and isinstance(before, Apply) and before.name == "degree"
            return word not in JOINING and not scale and not self.at_unit(before)
        if names.is_digit(c):
            return self.s[: self.i].rstrip().endswith("!")
        if c == "\\":
            name = self.command()
            if name == "text":
                found = _TEXT.match(self.s, self.i)
                return bool(found) and len(found[1].strip()) == 1 and not self.at_unit(before)  # type: ignore[index]
            return name in _FACTORS
        return c in "({" or (c == "[" and not self.bracketed) or (c == "|" and not self.bars and not self.conditional)

    def at_unit(self, before: Value) -> bool:
        """Whether a unit stands here, behind a value: a letter alone is one after a space, or in upright letters."""
        if self.inner or not is_node(before):
            return False
        found = units.read(self.s, self.i)
        if found is None:
            return False
        alone = len(self.name()) == 1
        return not alone or (isinstance(before, Num) and self.s[self.i - 1] == " ")

    def power(self) -> Value:
        value = self.atom()
        while True:
            if self.take("!"):
                double = self.take("!")
                value = Apply("fact2" if double else "fact", (self.node(value),))
            elif found := _CIRCLE.match(self.s, self.i):
                self.i = found.end()
                value = Apply("degree", (self.node(value),))
            elif self.take("**", "^"):
                if isinstance(value, Matrix):
                    raise Foreign("a power of a matrix")
                value = Apply("pow", (self.node(value), self.exponent()))
            else:
                return value

    def exponent(self) -> Node:
        self.enter()
        self.inner += 1
        sign = self.take("-", "+")
        value = self.node(self.group() if self.peek() == "{" else self.atom())
        if self.take("!"):
            value = Apply("fact", (value,))
        if self.take("**", "^"):
            value = Apply("pow", (value, self.exponent()))
        self.inner -= 1
        self.depth -= 1
        return negated(value) if sign == "-" else value

    # --- atoms --------------------------------------------------------------------------------------------------------

    def atom(self) -> Value:
        c = self.peek()
        if names.is_digit(c) or c == ".":
            return self.numeral()
        if names.is_letter(c):
            return names.word(self)
        if c == "{":
            return self.group()
        if c == "|":
            self.i += 1
            return self.bar_group("|")
        if c == "\\":
            return self.command_atom(self.command())
        return self.bracket()

    def bracket(self) -> Value:
        """A bracket with all that may stand in it: the grammar of whole answers."""
        raise NotImplementedError

    def numeral(self) -> Value:
        if not self.inner and (based := numerals.based(self.s, self.i)):
            self.i = based[1]
            return based[0]
        found = numerals.number(self.s, self.i, self.policy, self.bracketed > 0)
        if found is None:
            raise self.unreadable()
        value, self.i = found
        if value.value.denominator == 1 and not value.decimal:
            return self.mixed(value)
        return value

    def mixed(self, whole: Num) -> Node:
        """A whole number, and the fraction that may stand behind it: ``1 1/2``, ``1\\frac{1}{2}``."""
        if found := _MIXED.match(self.s, self.i):
            self.i = found.end()
            top, bottom = Num(Fraction(int(found[1]))), Num(Fraction(int(found[2])))
            fraction = Apply("mul", (top, Apply("inv", (bottom,))))
            return Apply("add" if self.policy.mixed == "sum" else "mul", (whole, fraction))
        if self.policy.mixed == "sum" and self.command() == "frac":
            start = self.i
            self.i += len(r"\frac")
            value = atoms.fraction(self)
            if _proper(value) and self.peek() not in ("^", "!"):
                return Apply("add", (whole, value))
            self.i = start
        return whole

    def group(self) -> Value:
        """What stands in the braces of LaTeX, where the signs around do not matter."""
        self.need("{")
        outside, self.bracketed = self.bracketed, 0
        bars, self.bars = self.bars, 0
        value = self.inside()
        self.need("}")
        self.bracketed, self.bars = outside, bars
        return value

    def inside(self) -> Value:
        """All that may stand in braces."""
        return self.sum()

    def argument(self) -> Node:
        """The argument of a command: in braces, or one digit, one letter or one command."""
        self.inner += 1
        c = self.peek()
        if names.is_digit(c):
            self.i += 1
            value: Value = Num(Fraction(int(c)))
        elif names.is_letter(c):
            self.i += 1
            value = names.letter(self, c)
        else:
            value = self.group() if c == "{" else self.atom()
        self.inner -= 1
        return self.node(value)

    def bar_group(self, closing: str) -> Node:
        self.bars += closing == "|"
        self.inner += 1
        value = self.node(self.sum())
        self.inner -= 1
        self.bars -= closing == "|"
        self.need(closing if closing == "|" else "\\" + closing)
        return Apply({"rfloor": "floor", "rceil": "ceil"}.get(closing, "abs"), (value,))

    def command_atom(self, name: str) -> Value:
        if name == "text":
            return names.text(self)
        if name == "begin":
            return atoms.matrix(self)
        if name in FOREIGN:
            raise Foreign(f"\\{name}")
        self.i += 1 + len(name)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in GREEK:
            return names.indexed(self, name)
        if name == "frac":
            return atoms.fraction(self)
        if name == "sqrt":
            return atoms.root(self)
        if name == "binom":
            return Apply("binom", (self.argument(), self.argument()))
        if name in FUNCTIONS:
            return atoms.function(self, FUNCTIONS[name])
        if name in BRACKETS:
            return self.bar_group(BRACKETS[name])
        if name in DECORATIONS:
            return names.decorated(self, name)
        if name == "mathbb" and (found := _NUMBER_SET.match(self.s, self.i)):
            self.i = found.end()
            return Reals(found[1])
        if name == "emptyset":
            return Many("set", ())
        self.i -= 1 + len(name)
        return self.bracket()


def _proper(fraction: Node) -> bool:
    """Whether it is a fraction of numbers between 0 and 1."""
    if not isinstance(fraction, Apply):
        return False
    top, below = fraction.args
    bottom = below.args[0] if isinstance(below, Apply) else below
    return isinstance(top, Num) and isinstance(bottom, Num) and 0 < top.value < bottom.value
