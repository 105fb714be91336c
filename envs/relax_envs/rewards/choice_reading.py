"""Which choices of a multiple choice question a text states. The docstring of ``Choice`` says the rules.

All patterns have bounded gaps: reading takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from relax_envs.rewards.choice_texts import NOTHING, ChoiceTexts, Stated, clean
from relax_envs.rewards.choice_words import (
    AND,
    CLAUSE,
    DELIMITER,
    ENDED,
    ENDS,
    HEDGED,
    LATIN,
    LEADS,
    MAYBE,
    NAMED,
    NEGATED,
    NO_LETTER,
    OR,
    PRAISED,
    PRONOUN,
    RETRACTED,
    SPLIT,
    STRONG,
    WEAK,
    WRONG,
    WRONG_ANSWER,
)
from relax_envs.rewards.reply import boxed_spans, tagged_spans

LOOKED_AT = 10_000
"""Characters at each end of a reply that are read; what lies between in a longer one is not."""


_ALTERNATIVE = re.compile(rf"(?:\bor(?:\s{MAYBE})?|[,.?;]\s?{MAYBE}|或者?|还是)\s?$", re.IGNORECASE)


__all__ = ["LOOKED_AT", "NOTHING", "ChoiceReader", "Stated"]


class _Items(NamedTuple):
    """Labels beside each other. ``firm``: none can be an article or a pronoun. ``marked``: the last is in brackets."""

    stated: Stated
    end: int
    firm: bool
    marked: bool


class _Line(NamedTuple):
    """A line that is nothing but choices; ``text``: the text of a choice, or a reason, stands behind them."""

    stated: Stated
    text: bool


class ChoiceReader:
    """Reads the answers to one question.

    ``labels``: A, B, ... or 1, 2, ...; ``texts``: those of the choices in the same order, where they are known.
    """

    def __init__(self, labels: Sequence[str], texts: Sequence[str] = ()) -> None:
        self.labels = tuple(labels)
        self.digits = self.labels[0].isdigit()
        kind = r"\d{1,2}" if self.digits else "[A-Za-z]"
        letters = f"[{''.join(self.labels)}]"
        run = kind if self.digits else f"(?-i:{letters}{{2,26}})"
        here = rf"(?={NAMED}[(\[{{<\"']?[ \t]?(?:{kind}|{run}){NO_LETTER})"
        self._item = re.compile(
            rf"(?P<named>{NAMED})(?P<open>(?:[(\[{{<]|(?<!\w)[\"'])[ \t]?)?"
            rf"(?<!{LATIN})(?P<label>{kind}){NO_LETTER}(?P<close>[ \t]?[)\]}}>\"'])?",
            re.IGNORECASE,
        )
        self._run = None if self.digits else re.compile(rf"{letters}(?: ?{letters}){{1,25}}")
        self._joined = None if self.digits else re.compile(rf"[(\[]?({letters}{{2,26}}){NO_LETTER}")
        self._strong, self._weak = (re.compile(where + here, re.IGNORECASE) for where in (STRONG, WEAK))
        self._retracted = re.compile(RETRACTED + here, re.IGNORECASE)
        self._strong_text = re.compile(STRONG, re.IGNORECASE)
        self._texts = ChoiceTexts(labels, texts)

    def read(self, text: str) -> Stated:
        """What a reply without its reasoning states last."""
        if len(text) > 2 * LOOKED_AT:
            text = f"{text[:LOOKED_AT]}\n{text[-LOOKED_AT:]}"
        boxes = [span for span in boxed_spans(text) if not _denied_box(text, span[0])]
        for spans in (tagged_spans(text, "answer"), boxes):
            if spans:
                return self._united(text, spans)
        return self._stated(clean(text).strip())

    def whole(self, text: str) -> Stated:
        """The labels of a text that is nothing but choices: a gold."""
        spans = boxed_spans(text)
        found = self._line(clean(text[slice(*spans[-1])] if spans else text))
        return found.stated if found else NOTHING

    def _united(self, text: str, spans: Sequence[tuple[int, int]]) -> Stated:
        """What the last tags or boxes state, with those directly before them: ``\\boxed{A} and \\boxed{C}``."""
        pieces, alternatives = [text[slice(*spans[-1])]], False
        for i in range(len(spans) - 2, -1, -1):
            end, start = spans[i][1], spans[i + 1][0]
            between = re.sub(r"</?answer>|\\f?box(?:ed)?|[{}$\s.]", " ", text[end : min(start, end + 60)]).strip()
            if start - end >= 60 or (between and not AND.fullmatch(between) and not OR.fullmatch(between)):
                break
            alternatives = alternatives or OR.fullmatch(between) is not None
            pieces.append(text[slice(*spans[i])])
        found = [self.read(piece) for piece in pieces]
        united = NOTHING.union(*found)
        return NOTHING if not all(found) or (alternatives and len(united) > 1) else united

    # --- statements -----------------------------------------------------------------------------------------------

    def _stated(self, text: str) -> Stated:
        text = self._without_retracted(SPLIT.sub(" ", text))
        found = [*self._behind(text, self._strong), *self._behind(text, self._weak), *self._praised(text)]
        found += [*self._lines(text), *self._texts_behind(text)]
        if found:
            return max(found, key=lambda candidate: candidate[0])[1]
        line = text.rpartition("\n")[2]
        mentioned = self._mentioned(line)
        return self._texts.within(line) if mentioned is None else mentioned

    def _without_retracted(self, text: str) -> str:
        """The text from the last choice on that replaces another: "A" of "B? No, A"."""
        start, place = 0, 0
        while found := self._retracted.search(text, place):
            place = found.start() + 1
            items = self._items(text, found.end())
            if items is not None and (ENDED.match(text, items.end) or PRAISED.match(text, items.end)):
                start = found.end()
        return text[start:]

    def _behind(self, text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, Stated]]:
        """Where and what is stated behind "the answer is" or, weaker, "so"."""
        place = 0
        while found := pattern.search(text, place):
            place = found.start() + 1
            items = self._items(text, found.end())
            if items is None or self._denied(text, found.start(), found.end(), items.end):
                continue
            ended = ENDED.match(text, items.end) is not None
            capital = items.marked or not text[found.end() :][:1].islower()
            if (ended and capital) if pattern is self._weak else (ended or items.firm):
                yield found.end(), self._with_rest(text, items)
                place = items.end

    def _texts_behind(self, text: str) -> Iterator[tuple[int, Stated]]:
        """ "The answer is Paris."."""
        for found in self._strong_text.finditer(text) if self._texts else ():
            line = _to_line_end(text, found.end())
            stated = self._texts.named(line) or self._texts.named(line.partition(". ")[0])
            if stated and not self._denied(text, found.start(), found.end(), found.end()):
                yield found.end(), stated

    def _praised(self, text: str) -> Iterator[tuple[int, Stated]]:
        """ "B is correct", "both A and C are right"."""
        end = 0
        for found in self._item.finditer(text):
            if found.start() >= end and (items := self._items(text, found.start())) is not None:
                end = items.end
                if PRAISED.match(text, end) and not NEGATED.search(text[max(0, found.start() - 40) : found.start()]):
                    yield found.start(), items.stated

    def _lines(self, text: str) -> Iterator[tuple[int, Stated]]:
        """Lines that are nothing but a choice. Several with texts list the choices, and state none of them."""
        found, place, others = [], 0, False
        for line in text.splitlines(keepends=True):
            if line.strip():
                read = self._line(line)
                others = others or read is None
                if read is not None:
                    found.append((place, read))
            place += len(line)
        named = {read.stated for _, read in found}
        alike = len({read.text for _, read in found}) == 1
        if alike and not others and len(named) > 1:  # nothing but choices: all of them are the answer
            yield found[-1][0], NOTHING.union(*named) if all(named) else NOTHING
            return
        listed = len({read.stated for _, read in found if read.text}) > 1
        yield from ((start, read.stated) for start, read in found if not (listed and read.text))

    def _line(self, line: str) -> _Line | None:
        line = re.sub(r"^[ \t]*[-•][ \t]+" if self.digits else r"^[ \t]*(?:[-•]|\d{1,2}[.)])[ \t]+", "", line).strip()
        if self._run is not None and self._run.fullmatch(line.strip(ENDS)):  # "AC"
            return _Line(frozenset(line) & frozenset(self.labels), False)
        items = self._items(line, 0)
        rest = line if items is None else line[items.end :]
        if items is not None and not rest.strip(ENDS + ")]}"):
            return _Line(items.stated, False)
        if items is None or (named := self._texts.named(line)):
            named = self._texts.named(line)
            return _Line(named, False) if named else None
        if WRONG.match(rest):
            return None
        if items.marked or DELIMITER.match(rest) or ENDED.match(rest):
            return _Line(self._with_rest(line, items), True)
        own = self._texts.named(rest)  # "B Paris"
        return _Line(items.stated, True) if own and own == items.stated else None

    def _mentioned(self, line: str) -> Stated | None:
        """The choice, or choices joined by "and", that a line without a statement mentions, those it excludes aside.

        None where it mentions none. Of alternatives only a choice that stands alone behind them counts.
        """
        found: list[Stated] = []
        for group in self._groups(line):
            before, behind = line[max(0, group[0].start() - 40) : group[0].start()], group[-1].end()
            if NEGATED.search(before) or WRONG.match(line, behind):
                continue
            labels = frozenset(item["label"].upper() for item in group)
            if len(group) == 1 and not self._surely(line, group[0]):
                continue
            joints = (line[one.end() : two.start()] for one, two in pairwise(group))
            alternatives = HEDGED.search(before) or any(OR.fullmatch(joint) for joint in joints)
            partner = len(group) == 1 and OR.search(before[-20:]) and re.search(r"\bor\b[^,;.]{0,10}$", before, re.I)
            found.append(NOTHING if (alternatives and len(labels) > 1) or partner else labels)
        if NOTHING in found:
            last = max(i for i, labels in enumerate(found) if not labels)
            found = found[last + 1 :] or [NOTHING]
        if not found:
            return None
        return found[0] if len(set(found)) == 1 else NOTHING

    def _groups(self, line: str) -> Iterator[list[re.Match[str]]]:
        """Labels that could be choices, those together that "or", "and", a comma or a slash joins."""
        group: list[re.Match[str]] = []
        for item in self._item.finditer(line):
            pronoun = item["label"] == "I" and PRONOUN.match(line, item.end())
            marked = bool(item["close"] or item["named"])
            if pronoun or not (marked or item["label"].isupper() or self.digits):
                continue
            joint = line[group[-1].end() : item.start()] if group else ""
            clause = joint.strip() == "," and CLAUSE.match(line, item.end())  # "unlike A, B is ..."
            if group and not clause and (OR.fullmatch(joint) or AND.fullmatch(joint)):
                group.append(item)
                continue
            if group:
                yield group
            group = [item]
            if self.digits and not marked:
                group = []
        if group:
            yield group

    def _surely(self, line: str, item: re.Match[str]) -> bool:
        """Whether a single label is a choice, and no article, pronoun or part of a name."""
        if item["close"] or item["named"]:
            return True
        before = line[max(0, item.start() - 40) : item.start()]
        article = item["label"] in "AI" and not re.compile(r"[.,;:!?]|$").match(line, item.end())
        return not self.digits and LEADS.search(before) is not None and not article

    # --- pieces -----------------------------------------------------------------------------------------------------

    def _items(self, text: str, place: int) -> _Items | None:
        """The labels that begin at ``place``, joined by "and", commas or "or"; or side by side: "AC"."""
        if self._joined is not None and (joined := self._joined.match(text, place)):
            return _Items(frozenset(joined[1]), joined.end(), True, False)
        stated: set[str] = set()
        alternatives, firm, end, marked = False, True, place, False
        while (item := self._item.match(text, place)) is not None:
            marked = bool(item["open"] and item["close"])
            close = item.end("label") if item["close"] and not marked else item.end()  # the ) of "B)" is a delimiter
            clause = CLAUSE.match(text, close) and not PRAISED.match(text, close)
            article = not marked and item["label"].islower() and not ENDED.match(text, close)
            article = article or (item["label"] == "I" and PRONOUN.match(text, close) is not None)
            if stated and (clause or article):
                break
            stated.add(item["label"].upper())
            firm = firm and (marked or (item["label"].isupper() and item["label"] not in "AI"))
            end = close
            joint = OR.match(text, end) or AND.match(text, end)
            if joint is None and marked and text[end : end + 2].strip()[:1] not in ("(", "["):
                break
            if joint is None and not marked:
                break
            place = joint.end() if joint else end + (text[end : end + 1] == " ")
            if joint and OR.match(text, end) and self._item.match(text, place):
                alternatives = True
        if not stated:
            return None
        return _Items(NOTHING if alternatives and len(stated) > 1 else frozenset(stated), end, firm, marked)

    def _with_rest(self, text: str, items: _Items) -> Stated:
        """What is stated when the line behind the items is read too: "B. Paris or C. London" is no clear answer."""
        rest = _to_line_end(text, items.end)
        if named := self._texts.named(rest):
            return items.stated if named <= items.stated else NOTHING
        found = set(items.stated)
        for item in self._item.finditer(rest):
            before, label = rest[: item.start()][-40:], item["label"].upper()
            if label not in self.labels or label in items.stated or NEGATED.search(before):
                continue
            alternative = _ALTERNATIVE.search(before) is not None
            joined = alternative or re.search(r"(?:\band|[&,;/、和及与])\s?$", before, re.IGNORECASE) is not None
            marked = bool(item["open"] and item["close"]) or re.compile(r"[.:)][ \t]+\S").match(rest, item.end("label"))
            listed = not item["open"] and item["label"].isupper() and re.search(r"\s$", before) and marked
            if CLAUSE.match(rest, item.end()):
                continue
            if alternative and (marked or item["label"].isupper()):
                if not marked and re.search(r"\b[A-Z]\)?,?\s?or\s?$", before):
                    continue  # a text about choices: "D. A or B"
                return NOTHING
            if (joined and marked) or listed:
                found.add(label)
        return frozenset(found) if items.stated else NOTHING

    def _denied(self, text: str, begin: int, start: int, end: int) -> bool:
        """Whether a statement from ``begin`` on, whose choices stand from ``start`` to ``end``, says the opposite."""
        return bool(
            WRONG.match(text, end)
            or NEGATED.search(text[max(0, start - 40) : start])
            or NEGATED.search(text[max(0, begin - 40) : begin])
            or WRONG_ANSWER.search(text[max(0, begin - 40) : begin])
        )


def _denied_box(text: str, start: int) -> bool:
    """Whether the box whose content begins at ``start`` follows a "not"."""
    before = re.sub(r"\$?\\f?box(?:ed)?\s?\{?$", "", text[max(0, start - 60) : start])
    return NEGATED.search(before) is not None


def _to_line_end(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : len(text) if end < 0 else end]
