"""Values of expressions: exact fractions as long as possible, else as many digits as the comparison needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import MPContext  # type: ignore[import-untyped]

from relax_envs.math.nodes import Const, Node, Num, Sym
from relax_envs.math.policy import Refused, Undefined

Number = Any
"""A Fraction, which is exact, or a real or complex number of mpmath."""

LARGEST = 40_000
"""Bits of a number, and of the exponents of those that are not exact: 3,000! and 10^10,000 are within."""
WORK = 4_000_000
"""Bits of all numbers that an expression comes by; for one that is not exact, ``IRRATIONAL``."""
IRRATIONAL = 10_000
LARGEST_ROOT = 1000
MOST_GAMMA = 200
"""Digits to which a factorial of what is no whole number is evaluated."""


_NOISE = 12
"""Bits at the end of a value that rounding may have made."""


@lru_cache(maxsize=1)
def context() -> Any:
    """This process's context of mpmath: making one takes a millisecond. Only for one thread."""
    return MPContext()


class Evaluator:
    """Evaluates expressions, with ``digits`` decimal digits where they are not exact.

    ``values``: of the variables. ``log``: the base of ``\\log`` without one. ``span`` afterwards holds the powers of
    two of the smallest and the largest number that was met. Raises Undefined, and Refused for what is too large.
    """

    def __init__(self, digits: int, values: Mapping[str, Fraction] | None = None, log: int | None = None) -> None:
        self.mp = context()
        self.digits, self.values, self.log = digits, values or {}, log
        self.span = (0, 0)
        self.work = 0

    def __call__(self, node: Node) -> Number:
        with self.mp.workdps(self.digits):
            try:
                return self.value(node)
            except (ArithmeticError, ValueError) as error:  # poles that are not looked for one by one
                raise Undefined(f"it has no value: {error}") from None

    def value(self, node: Node) -> Number:
        if isinstance(node, Num):
            return self.met(node.value)
        if isinstance(node, Sym):
            return self.values[node.name]
        if isinstance(node, Const):
            return self.constant(node.name)
        if node.name == "pow" and node.args[0] == Const("e"):
            return self.met(self.exp(self.value(node.args[1])))
        return self.met(self.apply(node.name, [self.value(arg) for arg in node.args]))

    def met(self, value: Number) -> Number:
        """The value, after its size was looked at."""
        if isinstance(value, Fraction):
            top, bottom = abs(value.numerator).bit_length(), value.denominator.bit_length()
            self.work += top + bottom
            magnitude = top - bottom
            if top + bottom > LARGEST:
                raise Refused("a number in it has too many digits")
        else:
            self.work += IRRATIONAL
            if not self.mp.isfinite(value):
                raise Undefined("it has no value")
            magnitude = 0 if value == 0 else int(self.mp.mag(value))
            if abs(magnitude) > LARGEST:
                raise Refused("a number in it is too large or too small")
        if self.work > WORK:
            raise Refused("it takes too many steps")
        if value != 0:
            self.span = (min(self.span[0], magnitude), max(self.span[1], magnitude))
        return value

    def constant(self, name: str) -> Number:
        if name == "inf":
            raise Undefined("it calculates with infinity")
        return {"pi": lambda: +self.mp.pi, "e": lambda: +self.mp.e, "i": lambda: self.mp.mpc(0, 1)}[name]()

    def inexact(self, value: Number) -> Number:
        if isinstance(value, Fraction):
            with self.mp.workdps(self.digits):
                return self.mp.mpf(value.numerator) / value.denominator
        return value

    def real(self, value: Number) -> Number:
        """The value without an imaginary part that is only rounding. Raises Undefined for one that is not real."""
        if not isinstance(value, self.mp.mpc):
            return value
        if abs(value.imag) > abs(value) * self.mp.mpf(10) ** (-self.mp.dps // 2):
            raise Undefined("it is not real")
        return value.real

    def apply(self, name: str, args: list[Number]) -> Number:
        if name == "add":
            return self.total(args)
        if name in ("mul", "call"):
            product = args[0]
            for factor in args[1:]:
                product = self.met(self.both(product, factor, lambda a, b: a * b))
            return product
        if name in ("neg", "inv", "percent", "degree"):
            return self.simple(name, args[0])
        if name == "pow":
            return self.power(args[0], args[1])
        if name == "root":
            return self.root(args[0], args[1])
        if name in ("fact", "fact2", "binom"):
            return self.combinatorial(name, args)
        if name in ("abs", "floor", "ceil", "sgn", "min", "max", "gcd", "lcm"):
            return self.discrete(name, args)
        return self.function(name, args)

    def total(self, args: list[Number]) -> Number:
        total = args[0]
        for part in args[1:]:
            total = self.met(self.both(total, part, lambda a, b: a + b))
        return total

    def both(self, a: Number, b: Number, operation: Callable[[Number, Number], Number]) -> Number:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return operation(a, b)
        return operation(self.inexact(a), self.inexact(b))

    def simple(self, name: str, value: Number) -> Number:
        if name == "neg":
            return -value
        if name == "inv":
            if value == 0:
                raise Undefined("it divides by zero")
            return 1 / value
        if name == "percent":
            return value / 100
        return value if value == 0 else self.inexact(value) * self.mp.pi / 180

    # --- powers and roots ---------------------------------------------------------------------------------------------

    def power(self, base: Number, exponent: Number) -> Number:
        if exponent == 0:
            return Fraction(1)
        if base == 0:
            if not isinstance(exponent, Fraction) or exponent < 0:
                raise Undefined("it has a power of zero without a value")
            return Fraction(0)
        if isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                return self.whole_power(base, exponent.numerator)
            if exponent.denominator <= LARGEST_ROOT:
                root = self.root(base, Fraction(exponent.denominator))
                return self.whole_power(self.met(root), exponent.numerator)
        return self.exp(self.inexact(exponent) * self.mp.log(self.inexact(base)))

    def whole_power(self, base: Number, exponent: int) -> Number:
        if base in (1, -1):
            return base if exponent % 2 else base * base
        if isinstance(base, Fraction):
            size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
            if (size - 1) * abs(exponent) > LARGEST or abs(exponent) > LARGEST:
                raise Refused("a power in it has too many digits")
            return base**exponent
        if abs(exponent) > LARGEST or abs(self.mp.mag(base)) * abs(exponent) > 4 * LARGEST:
            raise Refused("a power in it is too large or too small")
        return base**exponent

    def root(self, base: Number, index: Number) -> Number:
        """The real root where there is one: that of -8 is -2 for the index 3."""
        if not isinstance(index, Fraction) or index.denominator != 1 or not 0 < index <= LARGEST_ROOT:
            if index == 0:
                raise Undefined("it has a root with the index 0")
            return self.power(base, 1 / index)
        n = index.numerator
        negative = not isinstance(base, self.mp.mpc) and base < 0
        if negative and n % 2:
            return -self.root(-base, index)
        if isinstance(base, Fraction):
            exact = _exact_root(abs(base), n)
            if exact is not None:
                if not negative:
                    return exact
                return self.mp.mpc(0, 1) * self.inexact(exact) if n == 2 else self.mp.root(self.inexact(base), n)
        return self.mp.sqrt(self.inexact(base)) if n == 2 else self.mp.root(self.inexact(base), n)

    def exp(self, exponent: Number) -> Number:
        if exponent == 0:
            return Fraction(1)
        exponent = self.inexact(exponent)
        if abs(exponent) > LARGEST:
            raise Refused("a power in it is too large or too small")
        return self.mp.exp(exponent)

    # --- functions ----------------------------------------------------------------------------------------------------

    def combinatorial(self, name: str, args: list[Number]) -> Number:
        value = args[0]
        whole = all(isinstance(x, Fraction) and x.denominator == 1 for x in args)
        if not whole:
            if any(abs(x) > 1000 for x in args) or name == "fact2" or self.digits > MOST_GAMMA:
                raise Refused("a factorial in it is too large")
            gamma = [self.mp.gamma(self.inexact(x) + 1) for x in (value, *args[1:])]
            if name == "fact":
                return gamma[0]
            return gamma[0] / gamma[1] / self.mp.gamma(self.inexact(value) - self.inexact(args[1]) + 1)
        if value < 0:
            raise Undefined("it has a factorial of a negative number")
        n = value.numerator
        if name == "binom":
            k = args[1].numerator
            if k < 0 or k > n:
                return Fraction(0)
            if min(k, n - k) * n.bit_length() > LARGEST:
                raise Refused("a binomial coefficient in it is too large")
            return Fraction(math.comb(n, k))
        if n > 5000:
            raise Refused("a factorial in it is too large")
        return Fraction(math.factorial(n) if name == "fact" else math.prod(range(n, 0, -2)))

    def discrete(self, name: str, args: list[Number]) -> Number:
        if name == "abs":
            return abs(args[0])
        args = [self.real(x) for x in args]
        if name in ("min", "max"):
            return (min if name == "min" else max)(args, key=self.inexact)
        if name == "sgn":
            return Fraction((args[0] > 0) - (args[0] < 0))
        if name in ("floor", "ceil"):
            nearest = args[0] if isinstance(args[0], Fraction) else self.mp.nint(args[0])
            if nearest is not args[0] and abs(args[0] - nearest) > self.mp.mpf(10) ** (-self.mp.dps // 2):
                nearest = self.mp.floor(args[0]) if name == "floor" else self.mp.ceil(args[0])
            if not isinstance(nearest, Fraction):
                return Fraction(int(nearest))
            return Fraction(math.floor(nearest) if name == "floor" else math.ceil(nearest))
        if not all(isinstance(x, Fraction) for x in args):
            raise Undefined(f"it has a {name} of what is no fraction")
        up, down = (math.gcd, math.lcm) if name == "gcd" else (math.lcm, math.gcd)
        return Fraction(up(*(x.numerator for x in args)), down(*(x.denominator for x in args)))

    def function(self, name: str, args: list[Number]) -> Number:
        x = args[0]
        if name == "exp":
            return self.exp(x)
        if name in ("ln", "log"):
            return self.logarithm(x, None if name == "ln" else args[1] if len(args) > 1 else self.log)
        if abs(x) > 2**200:
            raise Refused(f"a number in it is too large for {name}")
        if x == 0 and name in ("sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh"):
            return Fraction(0)
        if x == 0 and name in ("cot", "csc", "acsc", "asec", "coth", "acoth"):
            raise Undefined(f"it has a {name} of zero")
        if "sinh" in name or "cosh" in name:
            self.exp(x)  # refuses what is too large
        value = getattr(self.mp, name)(self.inexact(x))
        noise = _NOISE + max(0, int(self.mp.mag(self.inexact(x)))) - self.mp.prec
        if name in ("sin", "cos", "tan") and self.mp.mag(value) < noise:
            return Fraction(0)  # what is left of a zero, such as the cosine of 90 degrees
        if name in ("tan", "cot", "sec", "csc") and self.mp.mag(value) > self.mp.prec // 2:
            raise Undefined(f"{name} has no value there")
        return value

    def logarithm(self, x: Number, base: Number | None) -> Number:
        """The natural one without a base; exact where it is a whole number."""
        if x == 0 or base in (0, 1):
            raise Undefined("it has a logarithm without a value")
        if x == 1:
            return Fraction(0)
        if base is None:
            return self.mp.log(self.inexact(x))
        base = Fraction(base) if isinstance(base, int) else base
        value = self.mp.log(self.inexact(x)) / self.mp.log(self.inexact(base))
        if isinstance(x, Fraction) and isinstance(base, Fraction) and x > 0 and base > 0:
            nearest = int(self.mp.nint(value))
            if 0 < abs(nearest) < LARGEST and self.whole_power(base, nearest) == x:
                return Fraction(nearest)
        return value


def _exact_root(value: Fraction, n: int) -> Fraction | None:
    """The n-th root of a fraction that is not negative, if it is a fraction."""
    top, bottom = _whole_root(value.numerator, n), _whole_root(value.denominator, n)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _whole_root(value: int, n: int) -> int | None:
    if n == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value < 2:
        return value
    mp = context()
    with mp.workprec(value.bit_length() // n + 32):
        root = int(mp.nint(mp.root(value, n)))
    return root if root**n == value else None
