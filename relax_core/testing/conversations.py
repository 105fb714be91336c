"""Conversations whose replies are given as tokens, played through a real adapter, and what must hold of each turn.

told = Told(adapter)
told.say(user("what"), reply=Drawn(told.ids("hello") + told.end))     # checks everything, and keeps the chat
told.chat.samples, told.rewritten

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


class Told:
    """A chat over an adapter with a chat template. ``say`` plays a turn and raises AssertionError where it is wrong."""

    def __init__(self, adapter: ModelAdapter, secret: str = "") -> None:
        """``secret``: a text that is in every reply and in nothing else that is said."""
        self.adapter, self.secret = adapter, secret
        self.engine = Answers([])
        self.chat = Chat(self.engine, adapter, Sampling(max_new_tokens=1 << 20), Seat(0, "told", 0, 0, ()))
        self.refused: list[str] = []
        self._written = True
        """Whether the newest sample's replies are as the template itself would write them."""

    @property
    def own(self) -> TemplateAdapter:
        adapter: Any = self.adapter
        return adapter  # type: ignore[no-any-return]

    def ids(self, text: str) -> list[int]:
        return [int(i) for i in self.own.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def say(self, *new: Message, reply: Drawn) -> Reply | None:
        """None where the template refuses what is said: then all is as it was."""
        history, samples = list(self.chat.history), list(map(_copy, self.chat.samples))
        kept = bool(samples) and _kept(self.own.template, history, new)
        self.engine.answers[:] = [reply]
        with tokenised(self.own.tokenizer) as texts:
            try:
                said = asyncio.run(self.chat(*new))
            except DataError as error:
                self.refused.append(str(error))
                assert self.chat.history == history and list(map(_copy, self.chat.samples)) == samples, "it left traces"
                return None
        whole = self.adapter.encode([*history, *new])
        if len(self.chat.samples) > len(samples):
            assert not kept, f"a new sample starts where the template keeps the past: {self.chat.rewrites[-1]}"
            self._check_begun(samples, whole)
            self._written = True
        else:
            self._check_extended(samples, whole, texts)
            self._written &= kept
        if self._written:
            shown, wanted = self._text(self._prompt.ids), self._text(whole.ids)
            assert shown == wanted, f"{shown!r} is not the template's {wanted!r}"
        check_sampled(self.chat.samples, self.engine.given)
        check_row(self.adapter, self.chat.samples[-1])
        return said

    def _text(self, ids: Sequence[int]) -> str:
        """Some tokenizers compose letters with their accents, which a policy may write apart."""
        return unicodedata.normalize("NFC", self.own.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _check_begun(self, samples: list[Any], whole: Encoded) -> None:
        """A new sample begins with the template's text of the whole conversation."""
        old = len(samples)
        assert list(map(_copy, self.chat.samples[:old])) == samples, "a sample that had ended was changed"
        assert len(self.chat.samples) == old + 1 and len(self.chat.rewrites) == old, "one sample for each rewriting"
        assert (self._prompt.ids, self._prompt.media) == (whole.ids, whole.media), "it is not the template's whole text"

    def _check_extended(self, samples: list[Any], whole: Encoded, texts: list[str]) -> None:
        """The newest sample goes on as the whole conversation does behind the last reply."""
        prompt, (ids, *_, media, _) = self._prompt, samples[-1]
        assert list(map(_copy, self.chat.samples[:-1])) == samples[:-1], "an older sample was changed"
        n = len(ids)
        observed = prompt.ids[n:]
        assert prompt.ids[:n] == ids and prompt.media[: len(media)] == media, "the past was changed"
        assert observed and observed == whole.ids[-len(observed) :], "what lies between is not the template's own"
        shift = len(prompt.ids) - len(whole.ids)
        wanted = [replace(ref, start=ref.start + shift) for ref in whole.media if ref.start + shift >= n]
        assert list(prompt.media[len(media) :]) == wanted, "media are elsewhere than in the template's"
        again = [text for text in texts if self.secret and self.secret in text]
        assert not again, f"sampled text was tokenised again: {again[0]!r}"

    @property
    def _prompt(self) -> Encoded:
        return self.engine.prompts[-1]


def check_sampled(samples: Sequence[Sample], given: Sequence[tuple[int, float, int]]) -> None:
    """Mask 1 covers what was sampled, all of it, once, in order; log-probs and versions are there and nowhere else."""
    found: list[tuple[int, float, int]] = []
    for sample in samples:
        n = len(sample.ids)
        assert len(sample.mask) == len(sample.logprobs) == len(sample.versions) == n, "columns of other lengths"
        rows = zip(sample.ids, sample.mask, sample.logprobs, sample.versions, strict=True)
        for i, sampled, logprob, version in rows:
            if sampled:
                found.append((i, logprob, version))
            else:
                assert (logprob, version) == (0.0, -1), "an observation has a log-prob or a version"
        assert sample.sampled, "a sample without a sampled token"
    assert found == list(given), "what is trained is not what was sampled"


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


def _kept(template: ChatTemplate, history: Sequence[Message], new: Sequence[Message]) -> bool:
    """Whether the template writes the last reply, letter for letter, into the text of the whole."""
    try:
        before = template.render(history[:-1], prompt=True)
        after = template.render([*history, *new], prompt=True)
    except DataError:
        return False
    ends = [str(template.tokenizer.convert_ids_to_tokens(i)) for i in template.stop_ids]
    return any(after.startswith(before + history[-1].text + end) for end in ends)


def _copy(sample: Sample) -> Any:
    positions = None if sample.positions is None else sample.positions.tolist()
    return (sample.ids[:], sample.mask[:], sample.logprobs[:], sample.versions[:], sample.media, positions)
