"""Answers in words: names, yes and no, the letter of a choice, times, ordinals."""

from __future__ import annotations

import re

from relax_envs.math.nodes import Many, Sym, Text, Value
from relax_envs.math.vocabulary import FUNCTIONS, GREEK, WORD_CONSTANTS

_WORDS = re.compile(r"[A-Za-z][A-Za-z' .,&-]*")
_PROSE = re.compile(r"[A-Za-z0-9 .,:;'\"?!&()/#-]*")
_TEXT_MARKS = re.compile(r"\\text\{([^{}]*)\}")
_EMPTY = frozenset(("empty set", "the empty set", "emptyset", "null set"))
_CHOICE = re.compile(r"(?:option|choice|answer)?\s*(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])\))\.?", re.IGNORECASE)
_ORDINAL = re.compile(r"(\d{1,9})\s?(?:\^\s?)?\{?\s?(?:\\text\{)?\s?(st|nd|rd|th|ST|ND|RD|TH)\s?\}?\s?\}?")
_TIME = re.compile(r"\d{1,2}:(?:0\d|\d\d(?=(?::\d\d)?\s?[apAP]))(?::\d\d)?\s?(?:[apAP]\.?\s?[mM]\.?)?")


def only_words(text: str) -> Value | None:
    """Words, or the letter of a choice; None for what should be read as mathematics."""
    bare = " ".join(_TEXT_MARKS.sub(r" \1 ", text).split())
    if re.fullmatch(r"[①-⑳ ,]+", bare):
        return Text("".join(sorted(set(bare) - set(" ,"))))
    if _TIME.fullmatch(bare):
        return Text(re.sub(r"[. ]", "", bare.casefold()))
    if found := _ORDINAL.fullmatch(text):
        return Text(found[1] + found[2].lower())
    if found := _CHOICE.fullmatch(bare):
        return Sym(found[1] or found[2] or found[3])
    marked = _TEXT_MARKS.fullmatch(text) is not None
    while bare.startswith("(") and bare.endswith(")") and marked:
        bare = bare[1:-1].strip()
    if not _WORDS.fullmatch(bare):
        return None
    words = _folded(bare)
    if words in _EMPTY:
        return Many("set", ())
    if len(words) == 1:
        return Sym(bare[0]) if bare.isalpha() and bare not in "ei" else None
    if not marked and re.search(r"\b(?:and|or|in)\b|,", words) and all(len(w) < 4 for w in re.split(r"\W+", words)):
        return None  # "x and y"
    if any(word in FUNCTIONS or word in GREEK or word == "sqrt" for word in bare.split()) or bare in WORD_CONSTANTS:
        return None
    product = re.fullmatch(r"[A-Za-z]?pi|[abcdkmnpqrstuvwxyz]{2,3}", bare)
    return None if product and not marked else Text(words)


def prose(text: str) -> Text | None:
    """Letters and digits that say something without being mathematics: ``3:00 PM``, ``2nd``."""
    bare = _TEXT_MARKS.sub(r" \1 ", text)
    if _PROSE.fullmatch(bare) and re.search(r"[A-Za-z]{2}", bare) and bare.count("(") == bare.count(")"):
        return Text(_folded(bare))
    return None


def _folded(text: str) -> str:
    return " ".join(re.sub(r"[.,;:!?\"]+(?=\s|$)|-", " ", text).casefold().split())
