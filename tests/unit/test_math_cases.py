"""The cases of tests/cases/math.jsonl: gold, response and what is right, for every kind and option of ``math``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from relax_envs.math.grade import grade
from relax_envs.rewards.reply import final_part

FILE = Path(__file__).resolve().parents[1] / "cases" / "math.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]
KINDS = {kind: list(cases) for kind, cases in groupby(CASES, key=lambda case: case["kind"])}

HOSTILE = {
    "a tower of powers": "9**9**9**9",
    "a tower of powers in LaTeX": r"\boxed{10^{10^{10}}}",
    "100,000 digits": "4" * 100_000,
    "100,000 characters in a box": r"\boxed{" + "1+" * 50_000 + "1}",
    "100,000 spaces in a box": r"\boxed{4" + " " * 100_000 + "}",
    "boxes nested 10,000 deep": r"\boxed{" * 10_000 + "4" + "}" * 10_000,
    "boxes that are never closed": r"\boxed{" * 10_000 + "4",
    "fractions that are never closed": r"\boxed{" + r"\frac{1}{" * 10_000,
    "brackets nested 10,000 deep": "(" * 10_000 + "4" + ")" * 10_000,
    "roots nested deep": r"\sqrt{" * 100 + "4" + "}" * 100,
    "factorials of factorials": "((((9!)!)!)!)!",
    "a large binomial": r"\binom{10^9}{10^8}",
    "a long sum of factorials": "+".join(["2999!/2998!"] * 80),
    "a large power of a polynomial": "(x+1)^{99999999}",
    "an endless sum": r"\sum_{i=1}^{10^9} i^i",
    "formulas that are never closed": r"\(" * 50_000,
    "phrases without an answer": "the answer is " * 20_000,
    "open tags": "<answer>" * 20_000,
    "a long text": "word " * 50_000,
    "backslashes": "\\" * 100_000,
    "dollars": "$" * 100_001,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    wrong = []
    for case in KINDS[kind]:
        found = grade([case["gold"]], final_part(case["response"]), case.get("options", {}))
        if found.get("reward") != case["reward"]:
            wrong.append((case["gold"], case["response"], case["reward"], found))
    assert not wrong


def test_there_are_cases_of_every_kind() -> None:
    assert len(KINDS) == len({case["kind"] for case in CASES}) >= 30 and len(CASES) >= 1000


@pytest.mark.parametrize("reply", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(5)
def test_an_answer_that_is_refused_is_wrong_and_takes_no_time(reply: str) -> None:
    for gold in ("4", r"\sqrt{2}", "x+1"):
        assert grade([gold], reply, {})["reward"] == 0.0


def test_of_several_golds_each_is_right_and_one_that_cannot_be_read_makes_a_bad_row() -> None:
    assert [grade(["4", r"\text{four}"], reply, {})["reward"] for reply in ("4", "four", "5")] == [1.0, 1.0, 0.0]
    assert grade(["4", "foo_{"], "4", {})["unreadable"] == "foo_{"


def test_a_bad_gold_is_named_with_the_reason() -> None:
    for gold, why in (
        ("99999!", "too large"),
        ("1/0", "divides by zero"),
        ("", "empty"),
        ("4" * 2000, "2000 characters"),
    ):
        found = grade([gold], "4", {})
        assert found["unreadable"] == gold and why in found["why"]


def test_it_says_which_answer_was_read() -> None:
    assert grade(["5"], r"First \boxed{4}, then \boxed{ 5 }.", {}) == {"reward": 1.0, "answer": " 5 "}
    assert grade(["5"], "It is $x=5$, I think.", {})["answer"] == "x=5"
    assert grade(["5"], "", {}) == {"reward": 0.0, "answer": None}


def options() -> dict[str, Any]:
    return {key: value for case in CASES for key, value in case.get("options", {}).items()}


def test_every_option_has_cases() -> None:
    from relax_envs.math.policy import Policy

    assert set(options()) == set(Policy.__dataclass_fields__)
