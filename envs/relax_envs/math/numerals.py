"""Numbers in digits: thousands separators by policy, decimals, repeating decimals, powers of ten; exact values."""

from __future__ import annotations

import re
from fractions import Fraction

from relax_envs.math.nodes import Based, Num
from relax_envs.math.policy import Policy, Refused, Unreadable

LONGEST = 1000
"""Digits of a number that is read."""
LARGEST_EXPONENT = 10_000

_COMMA = r"(?:,|\{,\})"
_WESTERN = re.compile(rf"\d{{1,3}}(?:{_COMMA}\d{{3}})+(?!\d|{_COMMA}\d)")
_INDIAN = re.compile(rf"\d{{1,2}}(?:{_COMMA}\d{{2}})+{_COMMA}\d{{3}}(?!\d|{_COMMA}\d)")
_SPACED = re.compile(r"\d{1,3}(?:[ ']\d{3})+(?!\d|\s*/|\s\d)")
_DOTTED = re.compile(r"\d{1,3}(?:\.\d{3})+(?!\d|\.\d)")
_DIGITS = re.compile(r"\d+")
_POINT, _DECIMAL_COMMA, _BRACED_COMMA = (re.compile(mark + r"(\d+)") for mark in (r"\.", r"(?:,|\{,\})", r"\{,\}"))
_REPEATING = re.compile(r"\\overline\s?\{(\d+)\}|\\dot\s?\{?(\d)\}?(?:(\d*)\\dot\s?\{?(\d)\}?)?")
_REPEATING_BRACKETS = re.compile(r"\((\d+)\)")
_GOES_ON = re.compile(r"\s?\.\.\.")
_EXPONENT = re.compile(r"[eE]([+-]?\d+)(?![\w.])")
_BASES = (
    *("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
)
_BASED = re.compile(
    rf"([0-9][0-9A-Fa-f]*)_(?:\{{\s*(?:\\text\{{)?\s*(\d{{1,2}}|{'|'.join(_BASES)})\s*\}}?\s*\}}|(\d{{1,2}}))(?!\d)"
)


def number(text: str, start: int, policy: Policy, bracketed: bool) -> tuple[Num, int] | None:
    """The number at ``start`` and where it ends; None if there is none.

    ``bracketed``: inside of ``( )``, ``[ ]`` or ``\\{ \\}`` a comma separates, unless what follows could be no number:
    ``(1,234)`` is a pair, ``(1,000)`` a number. Raises Unreadable where digits are grouped as no policy does
    (``1,00``), Refused where there are too many.
    """
    whole, end = _whole(text, start, policy, bracketed)
    place, decimals, repeating = end, "", ""
    point = _point(text, place, policy, bracketed)
    if point is not None:
        decimals, place = point
    elif text.startswith(".", place) and whole and not text.startswith("..", place):
        place += 1  # "5.", or a repeating part that begins at the point
    if whole == "" and decimals == "":
        return None
    if "." in text[end:place]:
        found = _REPEATING.match(text, place) or (None if decimals else _REPEATING_BRACKETS.match(text, place))
        if found:
            repeating, place = "".join(part or "" for part in found.groups()), found.end()
        elif found := _GOES_ON.match(text, place):
            decimals, repeating = _period(decimals)
            place = found.end()
    if len(whole) + len(decimals) + len(repeating) > LONGEST:
        raise Refused(f"it has a number of more than {LONGEST} digits")
    scale = 10 ** len(decimals)
    value = Fraction(int((whole or "0") + decimals), scale)
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * scale)
    if found := _EXPONENT.match(text, place):
        if len(found[1]) > 7 or abs(int(found[1])) > LARGEST_EXPONENT:
            raise Refused(f"it has a power of ten of more than {LARGEST_EXPONENT}")
        value, place = value * Fraction(10) ** int(found[1]), found.end()
    return Num(value, bool(decimals) and not repeating), place


def based(text: str, start: int) -> tuple[Based, int] | None:
    """A number with its base as an index, ``101_2``, and where it ends; None if there is none, or no such base."""
    found = _BASED.match(text, start)
    if found is None:
        return None
    word = found[2] or found[3]
    base = _BASES.index(word) + 2 if word in _BASES else int(word)
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in found[1]):
        return None
    return Based(found[1].upper().lstrip("0") or "0", base), found.end()


def _whole(text: str, start: int, policy: Policy, bracketed: bool) -> tuple[str, int]:
    """The digits before the point, and where they end."""
    separated = _separated(policy)
    for pattern in separated:
        found = pattern.match(text, start)
        if found is None:
            continue
        groups = re.split(r"\D+", found[0])
        by_comma = "," in found[0] and "{,}" not in found[0]
        if by_comma and text[max(0, start - 2) : start][-1:] == "," and text[start - 2 : start - 1].isdigit():
            continue  # "1,2,100"
        if bracketed and by_comma and not any(group[0] == "0" for group in groups[1:]):
            continue
        return "".join(groups), found.end()
    plain = _DIGITS.match(text, start)
    if plain is None:
        return "", start
    if start and text[start - 1] == "," and plain[0][0] == "0" and len(plain[0]) > 1:
        raise Unreadable(f"{text[:60]!r} groups digits as no policy does")
    return plain[0], plain.end()


def _separated(policy: Policy) -> tuple[re.Pattern[str], ...]:
    return {
        "comma": (_WESTERN, _SPACED),
        "indian": (_INDIAN, _WESTERN, _SPACED),
        "dot": (_DOTTED, _SPACED),
        "space": (_SPACED,),
        "none": (),
    }[policy.thousands]


def _point(text: str, place: int, policy: Policy, bracketed: bool) -> tuple[str, int] | None:
    """The digits after the point, or after the comma that is one, and where they end."""
    if policy.thousands == "dot":
        comma = _BRACED_COMMA if bracketed and ";" not in text else _DECIMAL_COMMA
        found = comma.match(text, place) or _POINT.match(text, place)
    else:
        found = _POINT.match(text, place) or _BRACED_COMMA.match(text, place)
    return (found[1], found.end()) if found else None


def _period(decimals: str) -> tuple[str, str]:
    """Decimals that go on, as those before the period, and the period: ``1666`` is ``1`` and ``6``.

    Raises Unreadable where no period is seen twice.
    """
    for length in range(1, len(decimals) // 2 + 1):
        period = decimals[-length:]
        if decimals.endswith(period * 2):
            before = decimals
            while before.endswith(period):
                before = before[:-length]
            return before, period
    raise Unreadable(f"it is not seen how the decimals {decimals[:40]!r} go on")
