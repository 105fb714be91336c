"""Reward ``f1``: common words of reply and answer, in any script."""

from __future__ import annotations

import time
from typing import Any

import pytest

from relax_core.errors import DataError
from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.f1 import F1
from relax_envs.rewards.words import compared_words, tokens


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("the cat sat", "a cat sat down", 0.8),  # 2 common; 2 and 3 words
        ("cat", "cat", 1.0),
        ("Cat!", "the cat", 1.0),
        ("cat", "dog", 0.0),
        ("cat", "cat cat cat", 0.5),
        ("cat cat", "cat", 2 / 3),
        ("red green blue", "blue red green", 1.0),
        ("don't", "dont", 1.0),
        ("U.S.", "US", 1.0),
        ("3.5", "35", 0.0),
        ("3.5", "3.5.", 1.0),
        (".5", ".5", 1.0),
        ("-3", "3", 0.0),
        ("−3", "-3", 1.0),
        ("1,000", "1000", 1.0),
        ("ＡＢＣ", "abc", 1.0),
        ("Straße", "STRASSE", 1.0),
        ("北京", "北京", 1.0),
        ("北京市", "北京", 0.8),
        ("北京。", "北京", 1.0),
        ("東京 tower", "tower 東京", 1.0),
        ("서울 타워", "서울", 2 / 3),
        ("สวัสดี", "สวัสดี", 1.0),
        ("हिन्दी भाषा", "हिन्दी", 2 / 3),
        ("", "", 1.0),
        ("", "cat", 0.0),
        ("cat", "", 0.0),
        ("the", "", 0.0),
        ("The", "the", 1.0),
        ("?", "?", 1.0),
        ("?", "", 0.0),
        (["cat", "the big dog"], "big dog", 1.0),
        (["cat", "dog"], "bird", 0.0),
        (42, "42", 1.0),
        (True, "true", 1.0),
        ("cat", "<think>dog</think> cat", 1.0),
        ("cat", "dog</think><answer>cat</answer> or so", 1.0),
        ("cat", "it is \\boxed{cat}", 1.0),
        ("cat", "<think>cat", 0.0),
        ("cat", "cat<|im_end|>", 1.0),
    ],
)
def test_share_of_common_words(answer: Any, reply: str, right: float) -> None:
    assert rewarded(F1, played(reply, answer=answer)) == pytest.approx(right)


def test_the_part_may_be_chosen() -> None:
    reply = "<think>dog</think> cat"
    assert rewarded(F1, played(reply, answer="cat"), part="reply") == pytest.approx(2 / 3)
    assert rewarded(F1, played(reply, answer="cat"), part="boxed") == 0.0


@pytest.mark.parametrize("answer", [[], {"a": 1}, [["cat"]], [None]])
def test_an_answer_that_is_no_text_is_an_error_of_the_row(answer: Any) -> None:
    with pytest.raises(DataError, match=r"task 't': the answer .* allowed: text or a number"):
        rewarded(F1, played("cat", answer=answer))


def test_it_abstains_without_an_answer_and_for_failed_plays() -> None:
    assert rewarded(F1, played("cat")) is None
    assert rewarded(F1, played("cat", answer="cat", failed=True)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The quick, brown fox.", ["quick", "brown", "fox"]),
        ("我爱you", ["我", "爱", "you"]),
        ("a-b", ["ab"]),
        ("x = -3.5", ["x", "-3.5"]),
        ("10-3", ["103"]),
        ("the a an", ["the", "a", "an"]),
        ("...", ["..."]),
        ("", []),
    ],
)
def test_words_that_are_compared(text: str, words: list[str]) -> None:
    assert compared_words(text) == words


def test_tokens_of_scripts_without_spaces_and_of_endless_words() -> None:
    assert tokens("I am, 我是") == ["I", "am", ",", "我", "是"]
    assert tokens("a" * 50) == ["a" * 50] and tokens("a" * 51) == ["a"] * 51


def test_a_hundred_thousand_characters_are_read_at_once() -> None:
    started = time.process_time()
    for piece in ("a ", "a", ".", "北", "-1 ", "\u0300"):
        rewarded(F1, played(piece * (100_000 // len(piece)), answer="cat"))
    assert time.process_time() - started < 4
