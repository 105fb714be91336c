"""The grader ``math``: finds the answer of a reply, reads it and the gold, and compares them. Runs in a worker."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from relax_envs.math import compare, tail
from relax_envs.math.extract import Answer, answers, balanced, formulas, gold_text
from relax_envs.math.nodes import Sym, Text, Value, is_node
from relax_envs.math.policy import Foreign, Policy, Refused, Undefined, Unreadable
from relax_envs.math.reading import read

_CHOICE = re.compile(r"\W*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?\s*(?:\(([A-Z])\)|([A-Z])[.):](?=[\s}]))")
_DIGIT = re.compile(r"\d")
_WRONG = (Unreadable, Refused, Undefined)


def grade(golds: Sequence[str], reply: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``{"reward": 1.0 or 0.0, "answer": what was read}``, or ``{"unreadable": gold, "why": ...}`` for a bad row.

    A reply is right if it agrees with one of the golds. ``options``: the fields of Policy.
    """
    policy = Policy(**options)
    known = []
    for gold in golds:
        try:
            known.append(_gold(gold, policy))
        except _WRONG as problem:
            return {"unreadable": gold, "why": str(problem)}
    found = answers(reply, policy)
    if not found:
        return {"reward": 0.0, "answer": None}
    verdicts = [_verdict(known, answer, policy) for answer in found]
    joined = all if policy.boxes == "all_equal" else any
    right = joined(verdict for verdict, _ in verdicts)
    shown = next((text for verdict, text in reversed(verdicts) if verdict == right), None)
    return {"reward": float(right), "answer": None if shown is None else shown[:200]}


@lru_cache(maxsize=1024)
def _gold(gold: str, policy: Policy) -> tuple[str, Value | None]:
    """The gold's text and what it says; None for what only math-verify reads. Raises what makes it a bad row."""
    text = gold_text(gold)
    found = [text]
    inside = formulas(text)
    if text == gold.strip() and len(inside) == 1:
        found += inside  # "The value is $5$"
    problem: Exception = Unreadable("it is empty")
    for spelling in found:
        try:
            value = read(spelling, policy)
            if (
                isinstance(value, Text)
                and spelling == text
                and len(found) > 1
                and text.strip("$.") != inside[0].strip()
            ):
                continue
            compare.check(value)
            return spelling, value
        except Foreign:
            if not balanced(spelling):
                continue
            with contextlib.suppress(Unreadable):  # then it is right to say the same in the same signs
                tail.check(spelling, policy)
            return spelling, None
        except _WRONG as error:
            problem = error if spelling == text else problem
    raise problem


def _verdict(golds: Sequence[tuple[str, Value | None]], answer: Answer, policy: Policy) -> tuple[bool, str | None]:
    """Whether the first spelling of an answer that can be read is right, and that spelling.

    What is refused was read: no other spelling is tried. Sums, integrals and the like are right only where the gold is
    one, too: to repeat the question is no answer.
    """
    of_words = any(isinstance(value, Text) for _, value in golds)
    for text, may_be_words in answer.spellings:
        try:
            value = read(text, policy)
            if isinstance(value, Text) and not (may_be_words and (of_words or not _DIGIT.search(text))):
                continue
        except Foreign:
            return any(_foreign(gold, text, policy) for gold, value in golds if value is None), text
        except Unreadable:
            value = None
        except Refused:
            return False, text
        if any(_chosen(gold, text) for _, gold in golds):
            return True, text
        if value is not None:
            return any(_right(gold, value, text, policy) for gold in golds), text
    return False, None


def _right(gold: tuple[str, Value | None], value: Value, text: str, policy: Policy) -> bool:
    gold_spelling, gold_value = gold
    if gold_value is None:
        return is_node(value) and _foreign(gold_spelling, text, policy)
    try:
        return compare.equal(gold_value, value, policy)
    except _WRONG:
        return False


def _foreign(gold: str, answer: str, policy: Policy) -> bool:
    if "".join(gold.split()) == "".join(answer.split()):
        return True
    try:
        return tail.equal(gold, answer, policy)
    except _WRONG:
        return False


def _chosen(gold: Value | None, text: str) -> bool:
    """Whether a gold that is a letter was chosen, with words behind it: ``(B) Paris``, ``B. 7``."""
    if not isinstance(gold, Sym) or len(gold.name) != 1 or not gold.name.isupper():
        return False
    found = _CHOICE.match(text)
    return found is not None and (found[1] or found[2]) == gold.name
