"""What a judgement says: the score or verdict that it ends with, or why there is none. Never a guess."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from relax_core.types import Stop

Reason = Literal["cut", "unreadable", "out_of_range", "contradictory", "late", "failed"]
"""Why a judgement says nothing. ``late``: it took longer than its deadline; ``failed``: there was no answer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A value between 0 and 1 (of a verdict: 1 for A, 0 for B, 0.5 for a tie), or the reason why there is none.

    ``text``: the judge's words, or what went wrong.
    """

    value: float | None
    reason: Reason | None
    text: str


_NUMBER = r"[-+]?\d{1,9}(?:\.\d{1,9})?"
_LETTER = r"(?:A|B|tie)"
_END = r"[*_`\s]*[.!]?[*_`]*[ \t]*$"
"""The end of a line, behind emphasis and a full stop."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to state something: how one begins, and what a well-formed one is (its groups hold what is stated)."""

    begins: re.Pattern[str]
    whole: re.Pattern[str]


def _forms(name: str, value: str) -> tuple[_Form, ...]:
    flags = re.IGNORECASE | re.MULTILINE
    return (
        _Form(
            re.compile(rf"\b{name}[*_`]*[ \t]*[:=]", flags),
            re.compile(rf"\b{name}[*_`]*[ \t]*[:=][*_`\s]*{value}{_END}", flags),
        ),
        _Form(re.compile(rf"<{name}>", flags), re.compile(rf"<{name}>\s*{value}\s*</{name}>", flags)),
        _Form(re.compile(rf'"{name}"\s*:', flags), re.compile(rf'"{name}"\s*:\s*"?{value}"?\s*(?=[,}}])', flags)),
        _Form(re.compile(r"\\boxed\b"), re.compile(rf"\\boxed\s?\{{\s*{value}\s*\}}", flags)),
    )


_SCORES = _forms("score", rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?")
_VERDICTS = (
    *_forms("verdict", rf"(?:reply\s+)?({_LETTER})"),
    _Form(re.compile(r"\[\["), re.compile(rf"\[\[\s*({_LETTER})\s*\]\]", re.IGNORECASE)),
)
_BARE_SCORE = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?[.!]?")
_BARE_VERDICT = re.compile(rf"({_LETTER})[.!]?", re.IGNORECASE)
_ANY_SCORE, _ANY_VERDICT = re.compile(_NUMBER), re.compile(rf"\b{_LETTER}\b", re.IGNORECASE)


def read_score(text: str, stop: Stop, worst: float, best: float) -> Reading:
    """The last score that is stated, as ``Score: 7``, ``Score: 7/10`` on a line's end, ``<score>7</score>``, JSON with
    ``"score": 7``, ``\\boxed{7}``, or a number and nothing else; where ``worst`` is 0 and ``best`` is 1.

    What stands before ``</think>`` does not count. An out-of-range score, or one of another scale, is none; so is a
    last statement that is malformed, and statements in several forms that differ.
    """

    def value(found: re.Match[str]) -> float | Reason:
        number = float(found[1])
        if not worst <= number <= best or (found[2] is not None and float(found[2]) != best):
            return "out_of_range"
        return (number - worst) / (best - worst)

    return _read(text, stop, _SCORES, _BARE_SCORE, _ANY_SCORE, value)


def read_verdict(text: str, stop: Stop) -> Reading:
    """The last verdict, ``A``, ``B`` or ``tie``, stated in the forms of ``read_score``, or as ``[[A]]``."""
    values: dict[str, float | Reason] = {"a": 1.0, "b": 0.0, "tie": 0.5}
    return _read(text, stop, _VERDICTS, _BARE_VERDICT, _ANY_VERDICT, lambda found: values[found[1].lower()])


def _read(
    text: str,
    stop: Stop,
    forms: tuple[_Form, ...],
    bare: re.Pattern[str],
    any_value: re.Pattern[str],
    value: Callable[[re.Match[str]], float | Reason],
) -> Reading:
    if stop is not Stop.EOS:
        return Reading(None, "cut", text)
    said = _conclusion(text)
    if said is None:
        return Reading(None, "unreadable", text)
    if whole := bare.fullmatch(said.strip()):
        return _reading(value(whole), text)
    begun = max((m.start() for form in forms for m in form.begins.finditer(said)), default=None)
    last = [matches[-1] for form in forms if (matches := list(form.whole.finditer(said)))]
    if not last or begun is None or begun > max(m.start() for m in last):
        return Reading(None, "unreadable", text)  # nothing is stated, or the last statement is malformed
    values = {value(match) for match in last}
    newest = max(last, key=lambda match: match.start())
    line = said[said.rfind("\n", 0, newest.start()) + 1 : newest.start()]
    before = [line[m.end() :] for form in forms for m in form.begins.finditer(line)]
    if len(values) > 1 or any(any_value.search(rest) for rest in before):  # two of them on one line, too
        return Reading(None, "contradictory", text)
    return _reading(values.pop(), text)


def _conclusion(text: str) -> str | None:
    """What comes after the judge's reasoning; None where that never ended."""
    _, closed, rest = text.rpartition("</think>")
    said = rest if closed else text
    return None if "<think>" in said else said


def _reading(value: float | Reason, text: str) -> Reading:
    return Reading(None, value, text) if isinstance(value, str) else Reading(value, None, text)
