"""Units of measurement, of money and of things that are counted, read from words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from relax_envs.math.nodes import Unit
from relax_envs.math.vocabulary import NO_UNIT

Powers = Mapping[str, int]

_F = Fraction
_TABLE: dict[str, tuple[Fraction, Powers]] = {}
"""Word -> (factor, powers of the base units)."""


def _add(words: str, factor: Fraction | int, **powers: int) -> None:
    for word in words.split():
        _TABLE[word] = (_F(factor), powers)


_PREFIXES = {"n": 9, "µ": 6, "u": 6, "m": 3, "c": 2, "d": 1, "": 0, "k": -3, "M": -6, "G": -9}
_LONG = {"nano": 9, "micro": 6, "milli": 3, "centi": 2, "deci": 1, "": 0, "kilo": -3, "mega": -6, "giga": -9}
for _letter, _stem, _scale, _powers in (
    ("m", "meter", 1, {"m": 1}),
    ("m", "metre", 1, {"m": 1}),
    ("g", "gram", _F(1, 1000), {"kg": 1}),
    ("s", "second", 1, {"s": 1}),
    ("L", "liter", _F(1, 1000), {"m": 3}),
    ("l", "litre", _F(1, 1000), {"m": 3}),
    ("N", "newton", 1, {"kg": 1, "m": 1, "s": -2}),
    ("J", "joule", 1, {"kg": 1, "m": 2, "s": -2}),
    ("W", "watt", 1, {"kg": 1, "m": 2, "s": -3}),
    ("Pa", "pascal", 1, {"kg": 1, "m": -1, "s": -2}),
    ("Hz", "hertz", 1, {"s": -1}),
    ("V", "volt", 1, {"V": 1}),
    ("A", "ampere", 1, {"A": 1}),
    ("C", "coulomb", 1, {"A": 1, "s": 1}),
    ("\u03a9", "ohm", 1, {"V": 1, "A": -1}),
    ("K", "kelvin", 1, {"K": 1}),
    ("mol", "mole", 1, {"mol": 1}),
    ("eV", "electronvolt", 1, {"eV": 1}),
    ("cal", "calorie", 1, {"cal": 1}),
    ("bit", "bit", 1, {"bit": 1}),
    ("B", "byte", 8, {"bit": 1}),
):
    for _prefix, _digits in _PREFIXES.items():
        _add(_prefix + _letter, _scale / _F(10) ** _digits, **_powers)
    for _prefix, _digits in _LONG.items():
        _add(f"{_prefix}{_stem} {_prefix}{_stem}s", _scale / _F(10) ** _digits, **_powers)

_add("sec secs", 1, s=1)
_add("min mins minute minutes", 60, s=1)
_add("h hr hrs hour hours", 3600, s=1)
_add("day days", 86400, s=1)
_add("week weeks", 604800, s=1)
_add("month months", 1, month=1)
_add("year years yr yrs", 12, month=1)
_add("in inch inches", _F(254, 10000), m=1)
_add("ft foot feet", _F(3048, 10000), m=1)
_add("yd yds yard yards", _F(9144, 10000), m=1)
_add("mi mile miles", _F(1609344, 1000), m=1)
_add("acre acres", _F(40468564224, 10000000), m=2)
_add("hectare hectares ha", 10000, m=2)
_add("mph", _F(44704, 100000), m=1, s=-1)
_add("kph kmh", _F(5, 18), m=1, s=-1)
_add("lb lbs pound pounds", _F(45359237, 100000000), kg=1)
_add("oz ounce ounces", _F(45359237, 1600000000), kg=1)
_add("ton tons tonne tonnes", 1000, kg=1)
_add("gal gallon gallons", 4, quart=1)
_add("quart quarts qt", 1, quart=1)
_add("pint pints", _F(1, 2), quart=1)
_add("cup cups", _F(1, 4), quart=1)
_add("$ dollar dollars usd bucks", 1, dollar=1)
_add("cent cents ¢", _F(1, 100), dollar=1)
_add("€ euro euros eur", 1, euro=1)
_add("£ gbp", 1, sterling=1)
_add("¥ yen yuan rmb jpy cny", 1, yen=1)
_add("₹ rupee rupees inr", 1, rupee=1)
_add("deg degree degrees", 1, degree=1)
_add("rad radian radians", 1, radian=1)
_add("unit units", 1)
_add("dozen dozens", 12)

DEGREE = Unit((("degree", 1),))
CURRENCIES = "$€£¥₹"
_VOWEL = re.compile("[aeiouAEIOU]")
_LONGEST = 80
_PREFIX_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIX_WORDS = {"squared": 2, "cubed": 3}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<open>\\text\{) | (?P<close>\}) | (?P<per>/|\\cdot\b\s*/|per\b)
    | (?P<times>\\cdot\b|\\times\b|\*|-(?=\s?[A-Za-z]))
    | (?P<power>\^\s*(?:\{\s*-?\d\s*\}|-?\d)|\d(?!\d))
    | (?P<word>[A-Za-z]+(?:\.(?!\d))?|[$€£¥₹Ω]|\\mu\s?[a-zA-Z]+|\\Omega)
    )""",
    re.VERBOSE,
)


def single(word: str, bare: bool = False) -> Unit | None:
    """The unit of one word; without powers for what is only counted. ``bare``: as variables may be written, too."""
    found = _known(word)
    if found is not None:
        return Unit(_ordered(found[1]), found[0], ((word, 1),) if bare and len(word) <= 2 else ())
    noun = len(word) > 3 or (len(word) > 1 and not bare)
    return Unit(()) if noun and word.isalpha() and _VOWEL.search(word) and word.lower() not in NO_UNIT else None


def _known(word: str) -> tuple[Fraction, Powers] | None:
    return _TABLE.get(word) or (_TABLE.get(word.lower()) if len(word) > 2 else None)


def read(text: str, start: int) -> tuple[Unit, int] | None:
    """The unit at ``start`` of a text in ``plain`` spelling, and where it ends; None if there is none.

    Read are words with exponents (``cm^2``, ``cm2``, ``square meters``, ``meters squared``), products and quotients
    (``km/h``, ``miles per hour``, ``N\\cdot m``), in ``\\text{}`` or not, and names of things (``apples``).
    """
    units: list[tuple[Unit, int]] = []
    place, end, sign, times, inside = start, 0, 1, 1, False
    while place - start < _LONGEST and len(units) < 8 and (token := _TOKEN.match(text, place)):
        kind, word = token.lastgroup, token[0].strip()
        if kind == "open" or kind == "close":
            if inside == (kind == "open"):
                break
            inside = not inside
        elif kind == "per":
            sign = -1
        elif kind == "power":
            if not units or token.start() != token.start(kind):
                break
            units[-1] = (units[-1][0], units[-1][1] * int(word.strip("^{} ")))
        elif kind == "word":
            name = word.rstrip(".").replace(r"\mu", "µ").replace(r"\Omega", "Ω").replace(" ", "")
            if name.lower() in _PREFIX_WORDS:
                times = _PREFIX_WORDS[name.lower()]
            elif name.lower() in _SUFFIX_WORDS and units:
                units[-1] = (units[-1][0], units[-1][1] * _SUFFIX_WORDS[name.lower()])
            elif (unit := single(name, bare=not inside)) is not None:
                units.append((unit, sign * times))
                times = 1
            else:
                break
        place = token.end()
        if units and not inside and kind in ("close", "power", "word"):
            end = place
    if not end or inside:
        return None
    return _product(units), end


def _product(units: list[tuple[Unit, int]]) -> Unit:
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for unit, power in units:
        factor *= unit.factor**power
        for base, times in unit.powers:
            powers[base] = powers.get(base, 0) + times * power
    letters = tuple((word, power) for unit, power in units for word, _ in unit.letters)
    return Unit(_ordered(powers), factor, letters if len(letters) == len(units) else ())


def _ordered(powers: Powers) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((base, times) for base, times in powers.items() if times))


def temperature(scale: str) -> Unit:
    """Degrees Celsius or Fahrenheit, which are not converted."""
    return Unit(((f"degree {scale}", 1),))
