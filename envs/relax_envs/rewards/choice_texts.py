"""The texts of a question's choices: which of them a text is, or has in its last sentence."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from relax_envs.rewards.choice_words import ENDS, NOISE, WIDE, WRAPPER

Stated = frozenset[str]
"""The labels that a text names as its answer; empty: none, or none that is clear, as in "A or B"."""

NOTHING: Stated = frozenset()

SENTENCE = re.compile(r"[.!?。！？](?:\s+|(?<=[。！？]))(?=\S)")
TEXT_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|hardly|unlikely|neither|nor|except|without|than|wrong|incorrect)\b|n't\b|不|非|排除)"
    r"(?:(?!\b(?:but|and|so|because|since|while|whereas|rather)\b)[^,;:()]){0,80}$"
)
TEXT_WRONG = re.compile(
    r"[^,;:().]{0,15}?(?:\b(?:is|was|are|were|seems?|looks?|can|could|would|does|did|do)(?:n't|\s(?:\w+\s)?"
    r"(?:not|never|wrong|incorrect|false|unlikely|impossible|out|ruled|excluded|eliminated))\b|\bcannot\b)|是?(?:不|错)"
)


class ChoiceTexts:
    """Finds the choices by their texts; ``labels`` and ``texts`` in the same order, both of one question."""

    def __init__(self, labels: Sequence[str], texts: Sequence[str]) -> None:
        self._texts: dict[str, set[str]] = {}
        for label, text in zip(labels, texts, strict=False):
            if plain := _plain(text):
                self._texts.setdefault(plain, set()).add(label)
        self._longest = 4 * max(map(len, texts), default=0) + 200  # with marks; a longer one is not even cleaned
        # a letter as a text is too often an article
        longest = sorted(
            (text for text in self._texts if len(text) > 1 or not text.isascii() or text.isdigit()),
            key=len,
            reverse=True,
        )
        self._any = re.compile("|".join(map(_whole_words, longest))) if longest else None

    def __bool__(self) -> bool:
        return bool(self._texts)

    def named(self, text: str) -> Stated:
        """The choice whose text this is; none where several have it."""
        if not self._texts or len(text) > self._longest:
            return NOTHING
        found = self._texts.get(_plain(text), set())
        return frozenset(found) if len(found) == 1 else NOTHING

    def within(self, line: str) -> Stated:
        """The one choice whose text stands in the last sentence of a line, those it denies aside."""
        line = " ".join(unicodedata.normalize("NFKC", line).casefold().replace("’", "'").split())
        found = [*self._any.finditer(line)] if self._any else []
        inside = {i for one in found for i in range(one.start(), one.end() - 1)}  # "St. Petersburg" ends no sentence
        start = 0
        for end in SENTENCE.finditer(line):
            if end.start() not in inside:
                start = end.end()
        labels: set[str] = set()
        for one in found:
            before = line[max(start, one.start() - 100) : one.start()]
            if one.start() >= start and not (TEXT_DENIED.search(before) or TEXT_WRONG.match(line, one.end())):
                labels |= self._texts[one[0]]
        return frozenset(labels) if len(labels) == 1 else NOTHING


def clean(text: str) -> str:
    """The text without markdown, LaTeX's text commands and full-width letters."""
    text = text.translate(WIDE)
    for _ in range(3):  # wrappers in wrappers
        text = WRAPPER.sub(r"\1", text)
    return NOISE.sub("", text)


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", clean(text)).casefold()
    return " ".join(text.strip(ENDS + ")]-–—").split())


def _whole_words(text: str) -> str:
    """A pattern of a text that is no part of a longer word or number; scripts without spaces have no word ends."""
    begins = r"(?<![\w-])(?<!\d[.,])" if ord(text[0]) < 0x2E80 else ""
    ends = r"(?!\w|-\w|[.,]\d)" if ord(text[-1]) < 0x2E80 else ""
    return begins + re.escape(text) + ends
