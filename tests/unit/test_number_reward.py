"""Reward ``number``, and how numbers are read: exactly, or not at all."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from relax_core.errors import DataError
from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.number import Number
from relax_envs.rewards.numbers import first_number, last_number, whole_number


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("4", "The GCD is 4.", 1.0),
        ("4", "of 12 and 8 it is 4", 1.0),
        ("4", "4 divides 12", 0.0),
        ("1000", "1,000.0", 1.0),
        (4, "4", 1.0),
        (0.5, "1/2", 1.0),
        ("-3", "-3", 1.0),
        ("3", "10-3", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("4", "four", 0.0),
        ("4", "", 0.0),
        ("4", "4" * 5000, 0.0),
        ("4", "<think>so 4</think> It is 5", 0.0),
        ("4", "<think>5</think> 4", 1.0),
        ("4", "5</think> 4<|im_end|>", 1.0),
        ("4", "<think>it is 4", 0.0),
        ("34", "3,4", 0.0),
        ("4", "3,4", 0.0),
        ("50", "50%", 1.0),
    ],
)
def test_the_last_number_counts(answer: object, reply: str, right: float) -> None:
    assert rewarded(Number, played(reply, answer=answer)) == right


@pytest.mark.parametrize("answer", ["four", "", "3,4", "4 or 5", True, [4], {"a": 4}, float("nan"), "9" * 200])
def test_an_answer_that_is_no_number_is_an_error_of_the_row(answer: Any) -> None:
    with pytest.raises(DataError, match=r"task 't': the answer .* cannot be read; allowed: a number"):
        rewarded(Number, played("4", answer=answer))


def test_it_abstains_without_an_answer_and_for_failed_plays() -> None:
    assert rewarded(Number, played("4")) is None
    assert rewarded(Number, played("4", answer="4", failed=True)) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("+42", 42),
        ("042", 42),
        ("42.", 42),
        ("42.0", 42),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("−3", -3),
        ("–3", -3),
        ("－３．５", Fraction(-7, 2)),
        ("４２", 42),
        ("٤٢", 42),
        ("1,000", 1000),
        ("12,345,678.9", Fraction(123456789, 10)),
        ("1,00,000", 100000),
        ("1_000", 1000),
        ("1{,}000", 1000),
        ("1\\,000", 1000),
        ("1\u202f000", 1000),
        ("1e3", 1000),
        ("1.5E-2", Fraction(3, 200)),
        ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)),
        ("3 1/2", Fraction(7, 2)),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("3\\dfrac{1}{2}", Fraction(7, 2)),
        ("$42", 42),
        ("\\$42", 42),
        ("-$42", -42),
        ("$-42", -42),
        ("€ 42", 42),
        ("42%", 42),
        ("(42)", 42),
        ("**42**", 42),
        ("3,4", None),
        ("1,0000", None),
        ("1.5.2", None),
        ("3:30", None),
        ("3/4/2020", None),
        ("5/0", None),
        ("1e9999", None),
        ("9" * 101, None),
    ],
)
def test_spellings_of_a_number(text: str, value: Any) -> None:
    assert whole_number(text) == first_number(text) == last_number(text) == value


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("42 apples", 42, 42),
        ("x=-3", -3, -3),
        ("top-3", 3, 3),
        ("from 1 to 5", 1, 5),
        ("40+2", None, 2),
        ("40 + 2", None, 2),
        ("2^5", None, 5),
        ("2 \\times 5", None, 5),
        ("1-4", None, 4),
        ("10 - 3", None, 3),
        ("5 m²", 5, 5),
        ("none", None, None),
    ],
)
def test_numbers_in_text(text: str, first: Any, last: Any) -> None:
    assert (first_number(text), last_number(text)) == (first, last)


@pytest.mark.parametrize(
    ("given", "value"),
    [(42, 42), (0.1, Fraction(1, 10)), (1e22, 10**22), (Decimal("0.5"), Fraction(1, 2)), (None, None)],
)
def test_answers_that_are_no_text(given: Any, value: Any) -> None:
    assert whole_number(given) == value


@pytest.mark.parametrize("piece", ["1", "1,", "1 ", "-", "$", "1/", " ", "1e", ".", ".1", "\\frac{1}{", "\u00a0", "1:"])
def test_a_hundred_thousand_characters_are_read_at_once(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    started = time.process_time()
    last_number(text), first_number(text), whole_number(text)
    assert time.process_time() - started < 2
