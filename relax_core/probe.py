"""The acceptance probe: whether an engine samples from what the trainer computes. No model, and no torch, is in here.

An engine is asked for replies, greedy and sampled, under weights that are known, and its log-probs are compared with
the truth: the banned, tempered log-softmax. Under *blank* weights (every tensor zero) the truth needs no model: all
allowed ids are equally likely, whatever the architecture.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relax_core.errors import RelaxError
from relax_core.interfaces import Completion, Engine, Request
from relax_core.types import DrawKey, Encoded, Sampling, Version

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_core.weights import WeightUpdate

TOKENS = 16
"""New tokens of a reply, at most."""
MEMBERS = 2
"""Replies of each kind: greedy ones must be alike, sampled ones show more of the vocabulary."""
LIMIT_S = 300.0
"""How long replies may take: the first ones of an engine may wait until its kernels are compiled."""
BLANK = 2e-5
"""How far a log-prob under blank weights may be off, in any dtype: the logits are zero, and a float32 log-softmax of
equal logits is exact but for its last digits."""
FALSE_SLOPE = 0.1
"""A temperature is wrong where log-probs grow by so much more or less than the trainer's, surely (four errors)."""
TELLING = 0.3
"""What a wrong temperature changes log-probs by, as a share of how far they are from the uniform one: from 0.7 to 1."""


MEAN_OF = 16
"""A mean of fewer differences is left to chance."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an engine's log-probs may be from the trainer's where it computes in this dtype."""

    dtype: str
    mean: float
    largest: float


FLOAT32 = Tolerance("float32", 1e-3, 1e-3)
"""Sums in another order: about 1e-5; kernels that round to TF32 reach a few times 1e-4."""
BFLOAT16 = Tolerance("bfloat16", 0.05, 0.5)
"""Eight bits a number. Between correct engines and trainers the mean is about 0.01 and the largest difference 0.1 where
a model is random, with sharp distributions up to 0.04 and 0.2, and more where logits of 20 or 30 are rounded. What is
wrong costs more, or shows in blank weights or as another temperature below this tolerance."""
FLOAT16 = Tolerance("float16", 0.01, 0.1)
"""Three bits more than bfloat16."""


def tolerance_of(*dtypes: str) -> Tolerance:
    """Of the coarsest of these dtypes. Unknown ones (quantized weights) count as bfloat16."""
    known = {t.dtype: t for t in (FLOAT32, FLOAT16)}
    return max((known.get(dtype, BFLOAT16) for dtype in dtypes), key=lambda t: t.largest, default=FLOAT32)


class Truth(Protocol):
    """Who knows the log-probs."""

    @property
    def who(self) -> str:
        """How findings call it."""

    @property
    def temperature(self) -> float | None:
        """The only temperature under which it knows them; None: it knows all."""

    def __call__(
        self, prompt: Encoded, replies: Sequence[Sequence[int]], temperature: float
    ) -> Awaitable[list[list[float]]]:
        """Of each token of some replies to the prompt, in order."""


@dataclass(frozen=True, slots=True)
class Reply:
    """``temperature`` 0: a greedy one, whose log-probs are those at temperature 1."""

    temperature: float
    weights: str
    """What the engine had when it was asked."""
    completion: Completion

    @property
    def heat(self) -> float:
        return self.temperature or 1.0

    @property
    def how(self) -> str:
        way = f"sampled at temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"{way}, {self.weights}"


@dataclass(slots=True)
class Probe:
    """Asks one engine, and keeps what is wrong in ``findings``, a line each. ``where``: how they call it."""

    engine: Engine
    adapter: ModelAdapter
    prompt: Encoded
    temperatures: Sequence[float]
    tolerance: Tolerance
    where: str = "engine"
    new: int = TOKENS
    limit_s: float = LIMIT_S
    findings: list[str] = field(default_factory=list)
    replies: int = 0
    tokens: int = 0
    largest: float = 0.0
    """Difference found under weights of a model."""
    uniform: bool = False
    """Whether the model is too uniform to tell one temperature from another."""

    @property
    def banned(self) -> frozenset[int]:
        return frozenset(self.adapter.banned_token_ids)

    @property
    def allowed(self) -> int:
        """Ids that may be sampled."""
        return self.adapter.vocab_size - len(self.banned)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate, weights: str) -> bool:
        """Whether it took the weights."""
        try:
            async with asyncio.timeout(self.limit_s):
                await self.engine.load_weights(update)
        except (RelaxError, TimeoutError) as error:
            self._find(f"{weights}: load_weights: {_said(error, self.limit_s)}")
            return False
        return True

    async def ask(self, version: Version, weights: str) -> list[Reply]:
        """Replies of every kind, all at once, under weights that were loaded as this version."""
        asked = [(t, member) for t in (0.0, *self.temperatures) for member in range(MEMBERS)]
        calls = [self.engine.generate(self._request(t, member, version)) for t, member in asked]
        try:
            async with asyncio.timeout(self.limit_s):
                found = await asyncio.gather(*calls)
        except (RelaxError, TimeoutError) as error:
            self._find(f"{weights}: generate: {_said(error, self.limit_s)}")
            return []
        replies = [Reply(t, weights, completion) for (t, _), completion in zip(asked, found, strict=True)]
        self.replies += len(replies)
        self.tokens += sum(len(reply.completion.ids) for reply in replies)
        unsound = (line for reply in replies for line in self._unsound(reply, version))
        self.findings += [f"{self.where}: {line}" for line in unsound][:1]  # the others are like it
        return replies

    def _request(self, temperature: float, member: int, version: Version) -> Request:
        """Draws under keys of its own, in the pool of evaluations: no training row's bits depend on it."""
        key = DrawKey("engine probe", 0, member, version.number % 1000)
        name = f"probe-{version.lineage}-{version.number}-{temperature:g}-{member}"
        return Request(name, key, self.prompt, Sampling(temperature, self.new), (member,), "eval")

    def _unsound(self, reply: Reply, version: Version) -> Iterator[str]:
        c = reply.completion
        if not c.ids or not len(c.ids) == len(c.logprobs) == len(c.versions):
            yield (
                f"{reply.how}: {len(c.ids)} ids, {len(c.logprobs)} log-probs and {len(c.versions)} versions; a reply "
                f"has one of each for each new token, 1 to {self.new}"
            )
        for i, (token, logprob, found) in enumerate(zip(c.ids, c.logprobs, c.versions, strict=False)):
            if token in self.banned:
                yield (
                    f"{reply.how}, token {i}: id {token} was drawn, but it is one of {len(self.banned)} banned ids: "
                    "mask all of ModelAdapter.banned_token_ids before the softmax"
                )
            if found != version:
                yield (
                    f"{reply.how}, token {i}: version {tuple(found)}, but {tuple(version)} was loaded before it was "
                    "asked for: a token's version is that of the weights that drew it"
                )
            if not math.isfinite(logprob) or not 0 <= token < self.adapter.vocab_size:
                yield f"{reply.how}, token {i}: id {token} of {self.adapter.vocab_size} with log-prob {logprob}"

    def _find(self, line: str) -> None:
        self.findings.append(f"{self.where}: {line}")

    # --- comparing ----------------------------------------------------------------------------------------------------

    def compare_blank(self, replies: Sequence[Reply]) -> None:
        """Under blank weights every allowed id is equally likely."""
        wanted = -math.log(self.allowed)
        pairs = [(r, i, x) for r in replies for i, x in enumerate(r.completion.logprobs)]
        off = [(abs(x - wanted), r, i, x) for r, i, x in pairs if not abs(x - wanted) <= BLANK]
        if not off:
            return
        _, reply, i, found = off[0]
        ids = f"all {self.allowed:,} allowed ids ({self.adapter.vocab_size:,} less {len(self.banned)} banned)"
        self._find(
            f"{reply.how}, token {i} (id {reply.completion.ids[i]}): log-prob {found:.6f}, but {ids} are equally "
            f"likely: {wanted:.6f}, give or take {BLANK:g}; so it is at {len(off)} of {len(pairs)} tokens: "
            + self._why_not_blank([x for *_, x in off])
        )

    def _why_not_blank(self, found: Sequence[float]) -> str:
        if max(found) - min(found) > BLANK:
            return "these are no blank weights: load_weights must put every published tensor in its place"
        ids = math.exp(-found[0])
        if abs(ids - self.adapter.vocab_size) < 0.5:
            return "as if nothing were banned: mask all of ModelAdapter.banned_token_ids before the softmax"
        return f"as if it drew from {ids:,.1f} ids: its vocabulary, its bans or its normalisation are others"

    async def compare(self, replies: Sequence[Reply], truth: Truth) -> None:
        """Under weights of a model: log-probs, by temperature, and that greedy ids are the most likely ones."""
        for temperature in (0.0, *self.temperatures):
            some = [r for r in replies if r.temperature == temperature and self._comparable(r)]
            if some and truth.temperature in (None, some[0].heat):
                wanted = await truth(self.prompt, [r.completion.ids for r in some], some[0].heat)
                self._compare(some, wanted, truth.who)
        if replies:
            await self._compare_order([r for r in replies if self._comparable(r)], truth)

    def _comparable(self, reply: Reply) -> bool:
        """Not one that is refused already, for what no truth has a number for."""
        c = reply.completion
        return bool(c.ids) and len(c.ids) == len(c.logprobs) and not self.banned.intersection(c.ids)

    def _compare(self, replies: Sequence[Reply], wanted: Sequence[Sequence[float]], who: str) -> None:
        rows = [
            (abs(a - b), reply, i, a, b)
            for reply, numbers in zip(replies, wanted, strict=True)
            for i, (a, b) in enumerate(zip(reply.completion.logprobs, numbers, strict=True))
        ]
        t, n = self.tolerance, len(rows)
        worst, reply, i, found, true = max(rows, key=lambda row: (math.isnan(row[0]), row[0]))
        mean = sum(row[0] for row in rows) / n
        self.largest = max(self.largest, worst)
        heat, sure = self._heat([(b, a) for *_, a, b in rows], reply)
        wrong = sum(not row[0] <= t.largest for row in rows)
        at = f"{reply.how}, token {i} (id {reply.completion.ids[i]}): log-prob {found:.4f}, {who} has {true:.4f}"
        if not worst <= t.largest:
            self._find(
                f"{at}: {worst:.4f} apart, {t.dtype} allows {t.largest:g}; so it is at {wrong} of {n} tokens{heat}: "
                + self._advice
            )
        elif n >= MEAN_OF and not mean <= t.mean:
            self._find(
                f"{at}: {mean:.4f} apart on average of {n} tokens, {t.dtype} allows {t.mean:g}{heat}: {self._advice}"
            )
        elif sure:
            self._find(f"{at}: over {n} tokens{heat}: {self._advice}")

    _advice = (
        "log-probs must be log_softmax(logits / temperature) over all ids that are not banned, by the weights that "
        "load_weights brought (greedy: at temperature 1); see docs/engines.md"
    )

    def _heat(self, pairs: Sequence[tuple[float, float]], reply: Reply) -> tuple[str, bool]:
        """Whether the numbers (true, found) look like those of another temperature: as words, and if that is sure.

        Log-probs less that of the uniform distribution grow about as 1 / temperature where a model is near it: there
        differences are within the tolerance, but not by chance.
        """
        base = math.log(self.allowed)
        square = sum((true + base) ** 2 for true, _ in pairs)
        if len(pairs) < 4 or not 0 < square < math.inf:
            self.uniform = self.uniform or not square
            return "", False
        slope = sum((true + base) * (found + base) for true, found in pairs) / square
        rest = sum((found + base - slope * (true + base)) ** 2 for true, found in pairs)
        error = 4 * math.sqrt(rest / (len(pairs) - 1) / square)
        if error > FALSE_SLOPE and math.sqrt(square / len(pairs)) * TELLING < self.tolerance.largest:
            self.uniform = True
        off = abs(slope - 1)
        if not (1 / 4 < slope < 4 and off > max(error, FALSE_SLOPE)):
            return "", False
        words = f", as if the temperature were about {reply.heat / slope:.2g} and not {reply.heat:g}"
        return words, error <= FALSE_SLOPE

    async def _compare_order(self, replies: Sequence[Reply], truth: Truth) -> None:
        """A greedy id is never less likely than any other at the same place, whether greedy or sampled."""
        greedy = [r for r in replies if not r.temperature][:1]
        if not greedy:
            return
        heat = truth.temperature or 1.0
        numbers = await truth(self.prompt, [r.completion.ids for r in replies], heat)
        best, true = greedy[0].completion.ids, dict(zip(map(id, replies), numbers, strict=True))
        slack = 2 * self.tolerance.largest
        for other in replies:
            ids = other.completion.ids
            place = next((i for i, (a, b) in enumerate(zip(best, ids, strict=False)) if a != b), None)
            if place is None:
                continue
            mine, its = true[id(greedy[0])][place], true[id(other)][place]
            if mine < its - slack or (not other.temperature and abs(mine - its) > slack):
                self._find(
                    f"{greedy[0].how}, token {place}: id {best[place]} with log-prob {mine:.4f} by {truth.who}, but id "
                    f"{ids[place]} ({other.how}) has {its:.4f}: temperature 0 must take the most likely allowed id"
                )
                return


def _said(error: BaseException, limit_s: float) -> str:
    return f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else str(error)


def summary(probes: Sequence[Probe]) -> str:
    """One line for engines that passed."""
    first = probes[0]
    many = f"{len(probes)} engines, " if len(probes) > 1 else ""
    t, banned = first.tolerance, len(first.banned)
    telling = math.log(first.adapter.vocab_size / first.allowed) > BLANK if banned else True
    asked = f"{many}{sum(p.replies for p in probes)} replies, {sum(p.tokens for p in probes)} tokens"
    worst = f"log-probs differ by at most {max(p.largest for p in probes):.2g} ({t.dtype} allows {t.largest:g})"
    return (
        f"engine probe: {asked}: {worst}; weights move; {banned} ids banned"
        + ("" if telling else " (too few of them to see in log-probs)")
        + ("; the model is too uniform to tell a wrong temperature" if any(p.uniform for p in probes) else "")
    )
