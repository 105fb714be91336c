"""Random conversations for hypothesis: what is said, how the policy answers, and where others branch off.

They are descriptions without tokens, so that one strategy serves every tokenizer; ``Answer.drawn`` makes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from relax_core.interfaces import ModelAdapter
from relax_core.testing.conversations import Drawn, Told
from relax_core.types import MediaPart, Message, Part, Stop, Text, ToolResult, ToolSpec, system, user

SECRET = "\ue042"
"""In every reply, and in nothing else that is said."""

MARKS = (
    *("<think>", "</think>", "<think>\n", "\n</think>\n\n", "<tool_call>", "</tool_call>", "<tool_response>"),
    *("</tool_response>", "user\n", "assistant\n", "model\n", "<|im_", "_end|>", "<start_of", "<｜", "\n\n\n"),
    *("{{ messages }}", "{% endfor %}", "{#", '{"name": "get", "arguments": {}}', "\\n", "<|im_end|>"),
)
"""What looks like marks of templates. Most are allowed in a text; where one is a special token, the text is refused."""
SPACES = (" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u2028", "\ufeff", "\x0b", "\x1c")
WORDS = ("weather", "the answer is 7 .", "don 't", "北京的天气", "مرحبا", "👩‍👩‍👧", "e\u0301", "naïve", "x" * 30)

letters = st.characters(exclude_categories=("Cs", "Co", "Cc"))
texts: SearchStrategy[str] = st.lists(
    st.one_of(st.sampled_from(WORDS), st.sampled_from(MARKS), st.sampled_from(SPACES), st.text(letters, max_size=6)),
    max_size=4,
).map("".join)


# --- replies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bit:
    """Some tokens of a reply: a text as the tokenizer cuts it, or letter by letter, or tokens of no meaning."""

    how: Literal["whole", "letters", "random"]
    text: str = ""
    numbers: tuple[int, ...] = ()

    def ids(self, cut: Callable[[str], list[int]], vocab_size: int) -> list[int]:
        if self.how == "random":
            return [n % vocab_size for n in self.numbers]
        return cut(self.text) if self.how == "whole" else [i for letter in self.text for i in cut(letter)]


@dataclass(frozen=True)
class Answer:
    """A reply. ``cuts`` are where the engine aborts it, in thousandths of its length."""

    bits: tuple[Bit, ...]
    ends: bool = True
    cuts: tuple[int, ...] = ()

    def drawn(self, adapter: ModelAdapter, cut: Callable[[str], list[int]], secret: str) -> Drawn:
        """Its tokens. A secret text stands between any two bits."""
        ids = self.bits[0].ids(cut, adapter.vocab_size)
        for bit in self.bits[1:]:
            ids += cut(secret) + bit.ids(cut, adapter.vocab_size)
        never = {*adapter.banned_token_ids, *adapter.stop_ids}  # by chance, or spelled and cut as a whole
        ids = [i for i in ids if i not in never]
        ids += [sorted(adapter.stop_ids)[len(ids) % len(adapter.stop_ids)]] if self.ends else []
        return Drawn(ids, Stop.EOS if self.ends else Stop.LENGTH, [c * len(ids) // 1000 for c in self.cuts])


def bits(words: SearchStrategy[str] = texts) -> SearchStrategy[Bit]:
    spelled = st.sampled_from(("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|image_pad|>", "<｜end▁of▁sentence｜>"))
    return st.one_of(
        words.map(lambda text: Bit("whole", text)),
        words.map(lambda text: Bit("letters", text)),
        spelled.map(lambda text: Bit("letters", text)),
        st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5).map(lambda n: Bit("random", numbers=tuple(n))),
    )


def _shape(before: str, between: str, after: str) -> Callable[[tuple[Bit, Bit]], tuple[Bit, ...]]:
    def shaped(two: tuple[Bit, Bit]) -> tuple[Bit, ...]:
        first, second = two
        return (Bit("whole", before), first, Bit("whole", between), second, Bit("whole", after))

    return shaped


CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "北京"}}\n</tool_call>'
SHAPES = {
    "plain": ("", "", ""),
    "thinking": ("<think>\n", "\n</think>\n\n", ""),
    "thinking, unclosed": ("<think>\n", "", ""),
    "thinking, opened by the template": ("", "\n</think>\n\n", ""),
    "call": ("", "", CALL),
    "two calls": ("", CALL + "\n", CALL),
    "thinking and a call": ("<think>\n", "\n</think>\n\n", CALL),
    "half a call": ("", "", CALL[:30]),
}


def answers(words: SearchStrategy[str] = texts, shapes: Sequence[str] = tuple(SHAPES)) -> SearchStrategy[Answer]:
    one = bits(words)
    shaped = st.sampled_from(tuple(shapes)).flatmap(lambda name: st.tuples(one, one).map(_shape(*SHAPES[name])))
    cuts = st.lists(st.integers(0, 999), max_size=2).map(tuple)
    return st.builds(Answer, shaped, st.sampled_from((True, True, True, False)), cuts)


# --- what is said -----------------------------------------------------------------------------------------------------


TOOL = ToolSpec("get", "Gets «the weather» of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})


def contents(words: SearchStrategy[str], media: SearchStrategy[Any] | None) -> SearchStrategy[tuple[Part, ...]]:
    """Text, or text and media in any order."""
    text = words.map(Text)
    part: SearchStrategy[Any] = text if media is None else st.one_of(text, media)
    return st.one_of(text.map(lambda t: (t,)), st.lists(part, min_size=1, max_size=3).map(tuple))


def said(
    words: SearchStrategy[str] = texts, media: SearchStrategy[Any] | None = None
) -> SearchStrategy[tuple[Message, ...]]:
    """The user's text, results of one or several calls, both, or a further word of the system."""
    content = contents(words, media)
    asked = content.map(lambda parts: user(*parts))
    results = st.lists(
        content.map(lambda parts: ToolResult(cast("tuple[Text | MediaPart, ...]", parts), "1")), min_size=1, max_size=3
    )
    found = results.map(lambda r: Message("tool", tuple(r)))
    return st.one_of(
        asked.map(lambda m: (m,)),
        found.map(lambda m: (m,)),
        st.tuples(found, asked),
        words.map(lambda text: (system(text), user(text))),
    )


@dataclass(frozen=True)
class Exchange:
    new: tuple[Message, ...]
    answer: Answer


@dataclass(frozen=True)
class Talk:
    """A play: a conversation, and others that go on behind so many of its replies, after each of which it goes on."""

    exchanges: tuple[Exchange, ...]
    branches: tuple[tuple[int, Exchange], ...] = ()

    def play(self, adapter: ModelAdapter, secret: str = SECRET) -> Told:
        """Raises AssertionError at the first turn that is recorded otherwise than it was said and sampled."""
        told = Told(adapter, secret)

        def say(one: Told, exchange: Exchange) -> None:
            one.say(*exchange.new, reply=exchange.answer.drawn(adapter, told.ids, secret))

        for exchange in self.exchanges:
            say(told, exchange)
        for turns, exchange in self.branches:
            say(told.branch(min(turns, len(told.rows))), exchange)
            say(told, exchange)
        return told


def talks(words: SearchStrategy[str] = texts, media: SearchStrategy[Any] | None = None) -> SearchStrategy[Talk]:
    """The user, or first the system, opens; one to four exchanges, and up to two branches. Some declare tools."""
    answer = answers(words)
    asked = contents(words, media).map(lambda parts: user(*parts))
    opening = st.one_of(
        asked.map(lambda m: (m,)),
        st.tuples(words.map(system), asked),
        st.tuples(st.one_of(st.just(system(TOOL)), words.map(lambda text: system(text, TOOL, TOOL))), asked),
    )
    first = st.builds(Exchange, opening, answer)
    later = st.builds(Exchange, said(words, media), answer)
    exchanges = st.builds(lambda one, more: (one, *more), first, st.lists(later, max_size=3))
    return st.builds(Talk, exchanges, st.lists(st.tuples(st.integers(0, 3), later), max_size=2).map(tuple))


def profile(examples: int) -> settings:
    """The same examples in every run, and nothing kept between runs; slow machines are no failures."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[p for p in Phase if p is not Phase.explain],
    )
