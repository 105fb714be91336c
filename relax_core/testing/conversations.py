"""Conversations whose replies are given as tokens, played through a real adapter, and what must hold of each turn.

told = Told(adapter)
told.say(user("what"), reply=Drawn([*told.ids("hello"), end]))     # plays and checks one turn
told.chat.samples, told.chat.rewrites

What was sampled is trained, once, as it was sampled; what lies between is the template's own; a text that was sampled
is never tokenised again, except as the context of a new sample where the template rewrites the past.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from relax_core.chat import Chat, Reply, Seat
from relax_core.errors import DataError
from relax_core.interfaces import Completion, Engine, Interrupt, ModelAdapter, Request, Segment
from relax_core.types import Encoded, Message, Sample, Sampling, Stop, Version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from relax_core.models.template import ChatTemplate
    from relax_core.weights import WeightUpdate


class TemplateAdapter(Protocol):
    """An adapter of a Hugging Face model."""

    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate


# --- an engine that answers what it is told ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A reply of the policy. ``cuts``: after so many tokens the engine gave the prefix back, and was asked to go on."""

    ids: Sequence[int]
    stop: Stop = Stop.EOS
    cuts: Sequence[int] = ()

    def pieces(self) -> list[Sequence[int]]:
        """All but the last may be empty."""
        borders = [0, *sorted(c for c in self.cuts if c < len(self.ids)), len(self.ids)]
        return [self.ids[a:b] for a, b in pairwise(borders)]


class Answers(Engine):
    """Answers what is in ``answers``, in order. Each token has a log-prob of its own; versions count the pieces."""

    def __init__(self, answers: list[Drawn]) -> None:
        super().__init__(None)
        self.answers = answers
        self.prompts: list[Encoded] = []
        """What was read before the first token of each reply."""
        self.given: list[tuple[int, float, int]] = []
        """Every token that was sampled, its log-prob and its version."""
        self._left: list[Sequence[int]] = []
        self._numbers, self._version = count(1), 0

    async def generate(self, request: Request) -> Completion:
        if not self._left:
            self.prompts.append(request.prompt)
            self._left = self.answers[0].pieces()
        ids = list(self._left.pop(0))
        stop = Stop.ABORT if self._left else self.answers.pop(0).stop
        self._version += 1
        logprobs = [-next(self._numbers) / 1024 for _ in ids]
        self.given += [(i, logprob, self._version) for i, logprob in zip(ids, logprobs, strict=True)]
        return Completion(ids, logprobs, [Version(0, self._version)] * len(ids), stop)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


# --- who tokenises what -----------------------------------------------------------------------------------------------


class _Noting:
    """A tokenizer of the library ``tokenizers`` that notes every text that it is given, by whatever method."""

    def __init__(self, inner: Any, texts: list[str]) -> None:
        self._inner, self._texts = inner, texts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not name.startswith("encode"):
            return found

        def noted(given: Any, *args: Any, **settings: Any) -> Any:
            self._texts += [given] if isinstance(given, str) else list(given)
            return found(given, *args, **settings)

        return noted


@contextmanager
def tokenised(tokenizer: PreTrainedTokenizerFast) -> Iterator[list[str]]:
    """The texts that are turned into tokens inside of the block."""
    texts: list[str] = []
    holder: Any = tokenizer
    inner = holder._tokenizer
    holder._tokenizer = _Noting(inner, texts)
    try:
        yield texts
    finally:
        holder._tokenizer = inner


# --- a conversation, checked turn by turn -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the policy has read and written when a turn ends. ``number``: of its sample."""

    number: int
    tokens: Encoded
    written: bool
    """Whether its replies are, letter for letter, as the template writes them."""


class Told:
    """A chat over an adapter with a chat template. ``say`` plays a turn and raises AssertionError where it is wrong."""

    def __init__(self, adapter: ModelAdapter, secret: str = "", engine: Answers | None = None) -> None:
        """``secret``: a text that is in every reply and in nothing else that is said."""
        self.adapter, self.secret, self.engine = adapter, secret, engine or Answers([])
        self.chat = Chat(self.engine, adapter, Sampling(max_new_tokens=1 << 20), Seat(0, "told", 0, 0, ()))
        self.refused: list[str] = []
        self.rows: list[Row] = []
        self._branched = False

    @property
    def own(self) -> TemplateAdapter:
        adapter: Any = self.adapter
        return adapter  # type: ignore[no-any-return]

    def ids(self, text: str) -> list[int]:
        return [int(i) for i in self.own.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def branch(self, turns: int) -> Told:
        """Another conversation of the play, behind the first ``turns`` replies of this one."""
        other = Told(self.adapter, self.secret, self.engine)
        other.chat, other.rows, other._branched = self.chat.branch(turns), self.rows[:turns], turns > 0
        return other

    def say(self, *new: Message, reply: Drawn) -> Reply | None:
        """None where the template refuses what is said: then all is as it was."""
        history, samples, rewrites = list(self.chat.history), list(map(_copy, self.chat.samples)), self.chat.rewrites[:]
        end = _end_behind(self.own.template, history, new) if self.rows else None
        self.engine.answers[:] = [reply]
        with tokenised(self.own.tokenizer) as texts:
            try:
                said = asyncio.run(self.chat(*new))
            except DataError as error:
                self.refused.append(str(error))
                assert self.chat.history == history and list(map(_copy, self.chat.samples)) == samples, "it left traces"
                return None
        whole = self.adapter.encode([*history, *new])
        rewritten = self.chat.rewrites[len(rewrites) :]
        if rewritten or not self.rows:
            assert end is None, f"a new sample starts where the template keeps the past: {rewritten[0]}"
            prompt = self._prompt
            assert (prompt.ids, prompt.media) == (whole.ids, whole.media), "it is not the template's whole text"
            written = True
        else:
            past = self.rows[-1]
            self._check_extended(past.tokens, whole, texts)
            stopped = past.tokens.ids[-1] in self.adapter.stop_ids
            written = past.written and (past.tokens.ids[-1] == end if stopped else end is not None)
        if written:
            shown, wanted = self._text(self._prompt.ids), self._text(whole.ids)
            assert shown == wanted, f"{shown!r} is not the template's {wanted!r}"
        begins = bool(rewritten) or self._branched or not self.rows
        number = len(samples) if begins else self.rows[-1].number
        self._check_grown(samples, number, begins)
        sample = self.chat.samples[number]
        self.rows.append(Row(number, Encoded(sample.ids[:], sample.media, sample.positions), written))
        self._branched = False
        check_sampled(self.chat.samples, self.engine.given)
        check_row(self.adapter, sample)
        return said

    @property
    def _prompt(self) -> Encoded:
        return self.engine.prompts[-1]

    def _text(self, ids: Sequence[int]) -> str:
        """Some tokenizers compose letters with their accents, which a policy may write apart."""
        text = self.own.tokenizer.decode(list(ids), skip_special_tokens=False)
        return unicodedata.normalize("NFC", str(text))

    def _check_extended(self, past: Encoded, whole: Encoded, texts: list[str]) -> None:
        """The prompt goes on behind the past as the whole conversation does behind the last reply."""
        prompt, n, media = self._prompt, len(past.ids), len(past.media)
        observed = prompt.ids[n:]
        assert prompt.ids[:n] == past.ids and prompt.media[:media] == past.media, "the past was changed"
        assert observed and observed == whole.ids[-len(observed) :], "what lies between is not the template's own"
        shift = len(prompt.ids) - len(whole.ids)
        wanted = [replace(ref, start=ref.start + shift) for ref in whole.media if ref.start + shift >= n]
        assert list(prompt.media[media:]) == wanted, "media are elsewhere than in the template's"
        again = [text for text in texts if self.secret and self.secret in text]
        assert not again, f"sampled text was tokenised again: {again[0]!r}"

    def _check_grown(self, before: list[Any], number: int, begins: bool) -> None:
        """One sample begins, or one goes on; all others are as they were, and so is its own past."""
        after = list(map(_copy, self.chat.samples))
        assert len(after) == len(before) + begins, f"{len(after)} samples"
        for i, old in enumerate(before):
            grown = tuple(column[: len(old[0])] for column in after[i][:4])
            assert (grown == old[:4]) if i == number else (after[i] == old), "what was recorded before was changed"
        prompt = len(self._prompt.ids) if begins else 0
        assert not any(after[number][1][:prompt]), "what a new sample begins with is trained"


def check_sampled(samples: Sequence[Sample], given: Sequence[tuple[int, float, int]]) -> None:
    """Mask 1 covers what was sampled, all of it, once, in order; log-probs and versions are there and nowhere else."""
    found: list[tuple[int, float, int]] = []
    for sample in samples:
        n = len(sample.ids)
        assert len(sample.mask) == len(sample.logprobs) == len(sample.versions) == n, "columns of other lengths"
        rows = list(zip(sample.ids, sample.mask, sample.logprobs, sample.versions, strict=True))
        own = [(i, logprob, version) for i, sampled, logprob, version in rows if sampled]
        assert own, "a sample without a sampled token"
        assert own == sorted(own, key=_drawn), "a sample has its tokens in another order than they were drawn in"
        assert all(row[2:] == (0.0, -1) for row in rows if not row[1]), "an observation has a log-prob or a version"
        found += own
    assert sorted(found, key=_drawn) == list(given), "what is trained is not what was sampled"


def _drawn(token: tuple[int, float, int]) -> float:
    """The later a token was drawn, the larger: ``Answers`` counts by log-probs."""
    return -token[1]


def check_row(adapter: ModelAdapter, sample: Sample) -> None:
    """Media cover exactly the placeholders, and positions are those that the whole row gets when it is made at once."""
    from relax_core.check_deep import placeholder_problems

    encoded = Encoded(sample.ids, sample.media, sample.positions)
    problems = list(placeholder_problems(encoded, adapter.banned_token_ids))
    assert not problems, problems[0]
    if sample.positions is not None:
        n = len(sample.ids)
        anew = adapter.forward_inputs([Segment(sample.ids, sample.media)], n)["position_ids"][:, 0]
        assert (anew.numpy() == sample.positions).all(), "positions are not those of the whole row"


def _end_behind(template: ChatTemplate, history: Sequence[Message], new: Sequence[Message]) -> int | None:
    """The id of the end of turn that the template writes behind the last reply, if it keeps that letter for letter."""
    try:
        before = template.render(history[:-1], prompt=True)
        after = template.render([*history, *new], prompt=True)
    except DataError:
        return None
    ends = {i: str(template.tokenizer.convert_ids_to_tokens(i)) for i in template.stop_ids}
    return next((i for i, end in ends.items() if after.startswith(before + history[-1].text + end)), None)


def _copy(sample: Sample) -> Any:
    positions = None if sample.positions is None else sample.positions.tolist()
    return (sample.ids[:], sample.mask[:], sample.logprobs[:], sample.versions[:], sample.media, positions)
