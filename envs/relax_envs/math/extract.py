"""Where the answer of a reply stands. Scans text, in time linear in its length; reads and evaluates nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from relax_envs.math.policy import LONGEST_REPLY, Policy

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s{0,9}(?:\[[^\]\n]{0,20}\]\s{0,9})*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"[^\s$]{1,200}")
_PERCENT = re.compile(r"\s{0,3}\\?%")
_END_TOKEN = re.compile(r"(?:<[|｜][\w｜▁-]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>)\Z")
_PHRASE = re.compile(
    r"\b(?:answers?|(?:correct|right|best) (?:option|choice))\b[*_]{0,2}\s{0,3}"
    r"(?:(?:is|are|would be|must be|equals)\b|[:：=])|答案(?:是|为|為|：|:)"
    r"|^[#*_ ]{0,9}(?:(?:the|my|final) ){0,2}answers?[#*_: ]{0,5}$",
    re.IGNORECASE | re.MULTILINE,
)
_CALCULATION = re.compile(r"<<[^<>\n]{0,100}>>")
"""The calculator's notes in replies that imitate gsm8k."""
_FORMULA_SIGN = re.compile(r"\\[()\[\]$]|\$\$?")
_CLAUSE = re.compile(
    r"[.!;?](?=\s|\Z)|,\s(?=[A-Za-z]{2})|\s(?=(?:because|since|as|when|where|for|so|which|that|but|if|by|hence|thus|"
    r"therefore|after|from|with)\b)|\s[(](?=[A-Za-z]{2})"
)
_MATHEMATICAL = re.compile(r"(?:[^A-Za-z\\]|\\[A-Za-z]+|\\.|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|pi|sqrt)+")
_PROGRAM = re.compile(r"__\w+__|\b(?:import|lambda|eval|exec|getattr)\b|\bos\.\w")
_MOST_BOXES = 50
_SCANNED = 2000
"""Characters after a phrase, and of a reply without any formula, that are looked at."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The spellings in which an answer may be meant; the first that can be read counts."""

    spellings: tuple[tuple[str, bool], ...]
    """Each with whether it may be words: in a box and behind a phrase, where it is known to be the answer."""


def answers(reply: str, policy: Policy) -> list[Answer]:
    """The answers that a reply gives by the policy: one, unless several boxes count; none where there is none."""
    text = reply[-LONGEST_REPLY:].rstrip()
    while text.endswith(">") and (token := _END_TOKEN.search(text[-50:])):
        text = text[: -len(token[0])].rstrip()
    text = _CALCULATION.sub("", _tagged(text))
    if boxes := boxed(text, first=policy.boxes == "first"):
        return _chosen(boxes, policy)
    if policy.extract == "box":
        return []
    found = _after_phrase(text) or _anywhere(text)
    return [found] if found else []


def gold_text(gold: str) -> str:
    """The answer in a gold: of its last box, after ``####``, or all of it."""
    if boxes := boxed(gold):
        return boxes[-1] or ""
    return gold.rpartition("####")[2].strip()


def boxed(text: str, first: bool = False) -> list[str | None]:
    """What stands in the last 50 boxes, or the first ones, inner ones left out; None for one that is never closed."""
    found: list[str | None] = []
    place = 0
    starts = [match.span() for match in _BOX.finditer(text)]
    for start, end in starts[:_MOST_BOXES] if first else starts[-_MOST_BOXES:]:
        if start < place:
            continue
        if text[end : end + 1] != "{":
            word = _UNBRACED.match(text, end)
            found.append(word[0].rstrip(".,;:") if word else None)
            place = word.end() if word else end
            continue
        closed = _closing(text, end)
        place = len(text) if closed is None else closed
        content = None if closed is None else text[end + 1 : closed]
        if content is not None and _PERCENT.match(text, place + 1):
            content += "%"
        found.append(content)
    return found


def formulas(text: str) -> list[str]:
    """What stands between the signs of mathematics mode: ``$..$``, ``$$..$$``, ``\\(..\\)``, ``\\[..\\]``."""
    found: list[str] = []
    opened, start = "", 0
    closing = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
    for sign in _FORMULA_SIGN.finditer(text):
        if opened:
            if sign[0] == closing[opened]:
                found.append(text[start : sign.start()])
                opened = ""
        elif sign[0] in closing:
            opened, start = sign[0], sign.end()
    return [formula for formula in found if formula.strip()]


def balanced(text: str) -> bool:
    """Whether every brace is closed."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _closing(text: str, start: int) -> int | None:
    """The place of the brace that closes the one at ``start``."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _tagged(text: str) -> str:
    """What the last complete ``<answer>`` tags hold, if there are any, else the text."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else text


def _chosen(boxes: Sequence[str | None], policy: Policy) -> list[Answer]:
    contents = [box or "" for box in boxes]  # a box that is never closed holds no answer
    if policy.boxes == "last":
        contents = contents[-1:]
    elif policy.boxes == "first":
        contents = contents[:1]
    elif policy.boxes == "list":
        contents = [", ".join(contents)]
    return [Answer(((content, True),)) for content in contents]


def _after_phrase(text: str) -> Answer | None:
    """What follows the last ``the answer is``, ``Answer:`` or ``####``."""
    phrase = None
    for phrase in _PHRASE.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    marker = text.rfind("####")
    place = max(phrase.end() if phrase else -1, marker + 4 if marker >= 0 else -1)
    if place < 0:
        return None
    rest = text[place : place + _SCANNED].lstrip(" \t*_:：\r\n")
    line = rest.partition("\n")[0].strip().rstrip("*_ ")
    if opened := _open_formula(line):  # a formula over several lines
        line = rest.partition(opened)[2].partition({"$$": "$$", r"\[": r"\]"}[opened])[0]
    if not line:
        return None
    clause = _CLAUSE.search(line)
    spellings = [(line, clause is None)]
    if clause:
        spellings.append((line[: clause.start()], True))
    spellings += [(formula, True) for formula in formulas(line)[:1]]
    spellings += [(run, False) for run in _runs(line)[:1]]
    return Answer((*spellings, (line, True)))


def _open_formula(line: str) -> str:
    stripped = line.strip()
    return stripped if stripped in ("$$", r"\[") else ""


def _anywhere(text: str) -> Answer | None:
    """The whole text, if it is one, else its last formula, else its last line or run of signs with a number in it."""
    text = text.strip()
    if not text:
        return None
    lines = text[-_SCANNED:].splitlines()
    last = lines[-1].strip()
    spellings = [(text, len(text.split()) <= 3)]
    if _PROGRAM.search(text):  # a number inside of a program is no answer
        return Answer(tuple(spellings))
    if found := formulas(text):
        return Answer((*spellings, (found[-1], False)))
    if last != text:
        spellings.append((last, False))
    spellings += [(run, False) for run in _runs(text[-_SCANNED:])[-1:]]
    return Answer(tuple(spellings))


def _runs(text: str) -> list[str]:
    """The stretches of a text that hold a digit and no word: ``5``, ``\\frac{1}{2} + 3``, ``2x + 1``."""
    runs: list[list[str]] = [[]]
    for word in text.split():
        if _MATHEMATICAL.fullmatch(word) or any(c.isdigit() for c in word):
            runs[-1].append(word)
            if word[-1] in ".;!?:":
                runs.append([])
        else:
            runs.append([])
    found = [" ".join(run).strip(" .,;:!?*_") if run[-1][-1] != "!" else " ".join(run) for run in runs if run]
    return [run for run in found if any(c.isdigit() for c in run)]
