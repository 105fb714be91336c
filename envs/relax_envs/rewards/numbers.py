"""Numbers as people and models write them, read as exact values.

Read: ``42``, ``+42``, ``-3`` with any minus sign, ``.5``, ``42.``, ``1,000``, ``1,00,000``, ``1_000``, ``1{,}000``,
``1e3``, ``1/2``, ``3 1/2``, ``\\frac{1}{2}``, ``$42``, ``-$42``, ``$-42``, ``42%``, and the digits of any script.
Signs of currency and percent, units and the text around are no part of the value: ``42%`` is 42. A minus directly
after a letter, a digit or a closing bracket is a hyphen or a subtraction: the last number of ``10-3`` is 3.

Where one number is expected, as behind ``####`` and in a gold, spaces may group by three: ``1 000``.

What looks like a number and is none: a comma that does not group by three (``3,4``), several points (``1.5.2``), a
ratio, a time or a date (``3:30``, ``3/4/2020``), a division by zero, an exponent of more than three digits, and what is
longer than ``LONGEST`` characters; that is decided before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST = 100
"""Characters of a number; a longer one is none."""

_ASCII = str.maketrans(
    dict.fromkeys("−‐‑‒–﹣－", "-")
    | {"＋": "+", "．": ".", "，": ",", "／": "/", "：": ":", "＄": "$", "％": "%"}
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
)
_FRAC = re.compile(r"\\[dt]?frac\s{0,3}\{\s{0,3}(-?\d+)\s{0,3}\}\s{0,3}\{\s{0,3}(\d+)\s{0,3}\}")
_SPACED = re.compile(r"(?<=\d)(?:[\u00a0\u2005-\u200a\u202f]|\\[,;! ]|\{,\})(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\w.,/])\d{1,3}(?: \d{3})+(?![\w/]|[.,]\d{3}(?!\d)| ?\d)")
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)\]}])[-+]|\A\s{0,9}[-+]\s{0,3})?       # no hyphen; with a space behind it only at the beginning
    (?:\\?[$€£¥₹]\s?[-+]?)?
    (?:\d+\s\d+/\d+(?![\d/]) | (?:\d+ | (?<![\w)])\.\d+) (?:[.,:/_]\d+)* (?:[eE][-+]?\d+(?!\w)(?:[.,:/_]\d+)*)?)
    """,
    re.VERBOSE,
)
_PLAIN = re.compile(r"(?:\d+(?:_\d+)*|\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_MIXED = re.compile(r"(?:(\d+)\s)?(\d+)/(\d+)")
_CALCULATION = re.compile(r"\s{0,3}(?:\*\*|[*/+^×÷·]|\\times|\\cdot|\\div)\s{0,3}[({]?\s?[\d.]|-\d|\s{1,3}-\s{1,3}\d")
_ALONE = re.compile(r"[^\w.+-]*")


def numbers_in(text: str) -> Iterator[Fraction | None]:
    """The numbers of a text in order; None for each that looks like one and is none."""
    for found in _NUMBER.finditer(_plain(text)):
        yield _value(found[0])


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None where there is none, or where what comes last only looks like one."""
    value = None
    for value in numbers_in(text):  # noqa: B007 - the last one is wanted
        pass
    return value


def first_number(text: str) -> Fraction | None:
    """The first number of a text, if it is finished: not ``40+2``, ``2^5`` or the range ``1-4``, which are None."""
    text = _grouped(_plain(text))
    found = _NUMBER.search(text)
    if found is None or _CALCULATION.match(text, found.end()):
        return None
    return _value(found[0])


def whole_number(given: Any) -> Fraction | None:
    """The value of a gold that is a number and nothing else but signs of currency, percent and punctuation."""
    if isinstance(given, bool) or not isinstance(given, str | int | float | Decimal | Fraction):
        return None
    try:
        text = _grouped(_plain(str(given)))
    except ValueError:  # more digits than Python writes out
        return None
    start = _ALONE.match(text).end()  # type: ignore[union-attr]
    found = _NUMBER.match(text, start) or _NUMBER.match(text)
    if found is None or re.search(r"[\w+-]", text[found.end() :]):
        return None
    return _value(found[0])


def _plain(text: str) -> str:
    text = text.translate(_ASCII)
    text = _FRAC.sub(r" \1/\2", text) if "frac" in text else text
    return _SPACED.sub(lambda found: "," if found[0] == "{,}" else "", text)


def _grouped(text: str) -> str:
    """Without the spaces of ``1 000``; only where one number is expected: elsewhere they may part two."""
    return _GROUPED.sub(lambda found: found[0].replace(" ", ""), text)


def _value(token: str) -> Fraction | None:
    if len(token) > LONGEST:
        return None
    negative = "-" in re.split(r"[\d.]", token, maxsplit=1)[0]
    body = token.lstrip("+-$€£¥₹\\ \t\n\r")
    if mixed := _MIXED.fullmatch(body):
        whole, top, bottom = (int(part or 0) for part in mixed.groups())
        if not bottom:
            return None
        value = whole + Fraction(top, bottom)
    elif _PLAIN.fullmatch(body):
        value = Fraction(Decimal(body.replace(",", "").replace("_", "")))
    else:
        return None
    return -value if negative else value
