"""Reward ``gsm8k``: the number behind the last ``####``."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.errors import DataError
from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.gsm8k import Gsm8k


@pytest.mark.parametrize(
    "reply",
    [
        "#### 42",
        "####42",
        "####   42",
        "####\n42",
        "##### 42",
        "####: 42",
        "so\n#### 42\n",
        "#### 42" + " and so on" * 1000,
        "#### 42\nwhich is 41 + 1",
        "#### 42 apples",
        "#### 42kg",
        "#### 42.",
        "#### 42.0",
        "#### 42.000",
        "#### +42",
        "#### 042",
        "#### $42",
        "#### \\$42",
        "#### 42$",
        "#### € 42",
        "#### US$42",
        "#### $42.00",
        "#### 42%",
        "#### **42**",
        "#### \\boxed{42}",
        "#### $\\boxed{42}$",
        "#### The answer is 42.",
        "#### x = 42",
        "#### 42!",
        "#### ４２",
        "#### 4.2e1",
        "#### 84/2",
        "#### 41\n#### 42",
        "<think>#### 41</think>\n#### 42",
        "reasoning</think>#### 42<|im_end|>",
    ],
)
def test_spellings_of_the_right_number(reply: str) -> None:
    assert rewarded(Gsm8k, played(reply, answer="42")) == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "42",
        "The answer is 42",
        "### 42",
        "# # # # 42",
        "####",
        "#### forty-two",
        "#### 41",
        "#### 420",
        "#### 4 2",
        "#### 42.5",
        "#### -42",
        "#### −42",
        "#### 42,5",
        "#### 42.1.1",
        "#### 42:30",
        "#### 40+2",
        "#### 6 * 7",
        "#### 42-43",
        "#### 42\n#### 41",
        "#### 42\n#### done",
        "<think>#### 42</think> 42",
        "<think>#### 42",
        "",
        "#### " + "4" * 100_000,
        "#### 42e" + "9" * 1000,
    ],
)
def test_anything_else_is_wrong(reply: str) -> None:
    assert rewarded(Gsm8k, played(reply, answer="42")) == 0.0


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("0.5", "#### .5"),
        ("0.5", "#### 1/2"),
        (0.5, "#### \\frac{1}{2}"),
        ("1000", "#### 1,000"),
        ("1000", "#### 1e3"),
        ("1,000", "#### 1000"),
        ("1234567", "#### 1,234,567"),
        ("-3", "#### -3"),
        ("-3", "#### −3"),
        ("-3", "#### - 3"),
        ("-3", "#### -$3"),
        ("3.5", "#### 3 1/2"),
        (42, "#### 42"),
        (42.0, "#### 42"),
        ("$42", "#### 42"),
        ("42%", "#### 42"),
        ("He has 40+2=<<40+2=42>>42 apples.\n#### 42", "#### 42"),
        (["41", "42"], "#### 42"),
        ("0", "#### 0"),
        ("0", "#### -0"),
    ],
)
def test_spellings_of_the_answer(answer: Any, reply: str) -> None:
    assert rewarded(Gsm8k, played(reply, answer=answer)) == 1.0
    assert rewarded(Gsm8k, played("#### 7", answer=answer)) == 0.0


def test_numbers_are_compared_exactly() -> None:
    assert rewarded(Gsm8k, played("#### 0.1", answer="0.10000000000000001")) == 0.0
    assert rewarded(Gsm8k, played("#### 9007199254740993", answer="9007199254740992")) == 0.0


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("It is 42.", 1.0),
        ("It is 42, not 41", 0.0),
        ("41 then #### 42 then 43", 1.0),
        ("#### none, so 42", 1.0),
        ("\\boxed{42}", 1.0),
        ("<think>42</think>", 0.0),
        ("", 0.0),
    ],
)
def test_without_the_marker_the_last_number_may_count(reply: str, right: float) -> None:
    assert rewarded(Gsm8k, played(reply, answer="42"), strict=False) == right


@pytest.mark.parametrize(
    "answer", ["forty-two", "", "42 or 43", "3,4", "so\n#### none", [], ["42", "x"], True, {"a": 42}]
)
def test_an_answer_without_a_number_is_an_error_of_the_row(answer: Any) -> None:
    with pytest.raises(DataError, match=r"task 't': the answer .* cannot be read; allowed: a number, or a solution"):
        rewarded(Gsm8k, played("#### 42", answer=answer))


def test_it_abstains_without_an_answer_and_for_failed_plays() -> None:
    assert rewarded(Gsm8k, played("#### 42")) is None
    assert rewarded(Gsm8k, played("#### 42", answer="42", failed=True)) is None


@pytest.mark.parametrize(
    ("number", "right"),
    [
        ("1 000", 1000),
        ("1\u00a0000", 1000),
        ("1\u2009000", 1000),
        ("1\u202f000", 1000),
        ("$12 345 678", 12345678),
        ("-1 000", -1000),
        ("1 000.50", "1000.5"),
        ("1 00", 1),
        ("1234 567", 1234),
        ("12 345 6", 12),
        ("3 1/2", "3.5"),
    ],
)
def test_spaces_group_by_three_digits(number: str, right: object) -> None:
    for reply in (f"#### {number}", f"#### {number}\n", f"#### {number} apples"):
        assert rewarded(Gsm8k, played(reply, answer=right)) == 1.0
        assert rewarded(Gsm8k, played(reply, answer=7)) == 0.0


def test_a_gold_may_group_by_spaces_and_two_numbers_of_a_sentence_stay_two() -> None:
    assert rewarded(Gsm8k, played("#### 1000", answer="1 000")) == 1.0
    assert rewarded(Gsm8k, played("#### 1000", answer="so\n#### 1 000")) == 1.0
    assert rewarded(Gsm8k, played("of 3 100", answer=100), strict=False) == 1.0
    assert rewarded(Gsm8k, played("so .5", answer=0.5), strict=False) == 1.0
