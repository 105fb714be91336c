"""What the checks of an engine share: weights that differ visibly, requests, and what a model in memory says.

Legend: N new tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from relax_core.interfaces import Completion, Engine, Interrupt, ModelAdapter, Request
from relax_core.probe import FLOAT32, MEAN_OF, Tolerance
from relax_core.types import DrawKey, Encoded, Sampling, Stop, Version

if TYPE_CHECKING:
    import torch

    from relax_core.interfaces import Transport
    from relax_core.weights import WeightUpdate

T = TypeVar("T")
GAUGES = {"running", "waiting", "version"}
COARSE = Tolerance("bfloat16", 0.03, 0.2)
"""Stricter than for any model that a run may have: these are small, and no sharper than ``SHARPNESS``."""
SHARPNESS = {"float32": 2.0}
"""Standard deviation of the logits that noise gives; in coarser dtypes 1: rounding must stay below the tolerance."""


@dataclass(frozen=True)
class Weights:
    """``model`` has what ``named`` publishes, in float32."""

    name: str
    model: torch.nn.Module
    named: Sequence[tuple[str, torch.Tensor]]


@dataclass
class Kit:
    """An engine under test. ``now``, ``version``: the weights that it was given last, and as what."""

    engine: Engine
    adapter: ModelAdapter
    dtype: str = "float32"
    lacks: frozenset[str] = frozenset()
    limit_s: float = 60.0
    long: int = 256
    transport: Transport = field(init=False)
    now: Weights = field(init=False)
    version: Version = field(default_factory=lambda: Version(0, 0))
    _made: dict[tuple[str, str], Weights] = field(default_factory=dict)
    _asked: int = 0
    differences: list[float] = field(default_factory=list)
    """Of log-probs, since the last ``mean``."""

    def __post_init__(self) -> None:
        from relax_core.transports import SharedTransport

        self.transport = SharedTransport(SharedTransport.Config())
        self.now = self.weights("first")

    @property
    def tolerance(self) -> Tolerance:
        return FLOAT32 if self.dtype == "float32" else COARSE

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self, name: str, stops: Literal["as they are", "never", "often"] = "as they are") -> Weights:
        """``first``: the model's own; any other name: with noise of its own.

        ``stops``: the ids that end a reply get zeros for embeddings, so that their logits are 0 and never the largest;
        or large ones.
        """
        if (name, stops) not in self._made:
            self._made[name, stops] = self._make(name, stops)
        return self._made[name, stops]

    def _make(self, name: str, stops: str) -> Weights:
        import torch

        from relax_core.torch.optim import named_tensors
        from relax_core.torch.plain import add_noise

        model = self.adapter.load("cpu", getattr(torch, self.dtype))
        if name != "first":
            add_noise(model, sum(name.encode()), SHARPNESS.get(self.dtype, 1.0))
        with torch.no_grad():
            for parameter in model.parameters():
                if stops != "as they are" and parameter.ndim == 2 and len(parameter) >= self.adapter.vocab_size:
                    parameter[sorted(self.adapter.stop_ids)] *= 0.0 if stops == "never" else 4.0
        return self._held(name, [(key, tensor.clone()) for key, tensor in named_tensors(model)])

    def _held(self, name: str, named: Sequence[tuple[str, torch.Tensor]]) -> Weights:
        import torch

        from relax_core.torch.swap import take_weights

        exact = self.adapter.load("cpu", torch.float32).eval().requires_grad_(False)
        take_weights(exact, named)
        return Weights(name, exact, named)

    def mixed(self, one: Weights, other: Weights, names: frozenset[str]) -> Weights:
        """The one's tensors of these names, and all else of the other."""
        pairs = zip(one.named, other.named, strict=True)
        return self._held(f"{one.name} and {other.name}", [a if a[0] in names else b for a, b in pairs])

    def published(
        self, named: Sequence[tuple[str, torch.Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        """As a newer version than any before."""
        self.version = Version(0, self.version.number + 1)
        return self.transport.publish(self.version, named, frozen)

    async def load(
        self, weights: Weights, interrupt: Interrupt = "continue", frozen: frozenset[str] = frozenset()
    ) -> None:
        update = self.published(weights.named, frozen)
        await self.within(self.engine.load_weights(update, interrupt), f"load_weights ({interrupt})")
        self.now = weights

    # --- requests -----------------------------------------------------------------------------------------------------

    def prompt(self, seed: int, length: int | None = None) -> Encoded:
        """Ids that a reply could have as well, at random."""
        rng = random.Random(seed)
        never = {*self.adapter.banned_token_ids, *self.adapter.stop_ids}
        words = [i for i in range(self.adapter.vocab_size) if i not in never]
        return Encoded(rng.choices(words, k=length or rng.randint(2, 24)))

    def request(
        self, seed: int, new: int, temperature: float = 0.0, prompt: Encoded | None = None, **more: Any
    ) -> Request:
        """Number ``seed``: its own prompt, if none is given, and its own draws."""
        self._asked += 1
        return Request(
            f"check-{self._asked}",
            DrawKey(f"check {seed}", 0, 0, 0),
            prompt or self.prompt(seed),
            Sampling(temperature, new),
            **more,
        )

    async def ask(self, *requests: Request) -> list[Completion]:
        """All at once."""
        return await self.within(asyncio.gather(*map(self.engine.generate, requests)), f"{len(requests)} requests")

    async def running(self, count: int, temperature: float = 0.0) -> list[tuple[Request, asyncio.Task[Completion]]]:
        """Long requests that are being decoded when this returns."""
        requests = [self.request(100 + i, self.long, temperature) for i in range(count)]
        tasks = [asyncio.create_task(self.engine.generate(r)) for r in requests]
        await self.gauges(lambda g: g["running"] >= count or any(t.done() for t in tasks), f"{count} running requests")
        return list(zip(requests, tasks, strict=True))

    async def gauges(self, wanted: Callable[[Any], bool], what: str) -> None:
        """Wait until the engine's gauges say so."""

        async def poll() -> None:
            while True:
                found = await self.engine.health()
                assert found.keys() >= GAUGES, f"health() has {sorted(found)}; it has at least {sorted(GAUGES)}"
                if wanted(found):
                    return
                await asyncio.sleep(0.001)

        await self.within(poll(), f"health() shows {what}")

    async def within(self, work: Awaitable[T], what: str) -> T:
        """Fails when it takes longer than the limit: an engine that drops a request would wait for ever."""
        try:
            async with asyncio.timeout(self.limit_s):
                return await work
        except TimeoutError:
            raise AssertionError(f"{what}: nothing within {self.limit_s:g} s") from None

    # --- what must hold of a reply ------------------------------------------------------------------------------------

    def whole(self, request: Request, c: Completion) -> None:
        """One of each per token, no banned id, and it ended as it says: for what is known without a model."""
        new, stop_ids, banned = len(c.ids), self.adapter.stop_ids, set(self.adapter.banned_token_ids)
        left = request.sampling.max_new_tokens - request.drawn
        counts = f"{new} ids, {len(c.logprobs)} log-probs, {len(c.versions)} versions"
        assert new == len(c.logprobs) == len(c.versions), f"{counts}: a reply has one of each for each new token"
        assert new <= left, f"{new} new tokens: at most {left} were left of max_new_tokens"
        drawn = sorted(banned.intersection(c.ids))
        assert not drawn, f"banned ids {drawn} were drawn: mask ModelAdapter.banned_token_ids before the softmax"
        assert not stop_ids.intersection(c.ids[:-1]), f"goes on after a stop id: {c.ids}, stop ids {sorted(stop_ids)}"
        ended = bool(c.ids) and c.ids[-1] in stop_ids
        if c.stop is not Stop.ABORT:
            assert new, f"has no token, but stop {c.stop}"
            wanted = Stop.EOS if ended else Stop.LENGTH
            assert c.stop is wanted, f"stop is {c.stop}, but it ends with {c.ids[-1]}: {wanted} (stop ids: {stop_ids})"
            assert ended or new == left, f"{new} tokens and stop {c.stop}, but {left} were asked for"

    def agrees(self, request: Request, c: Completion, weights: Weights | None = None) -> None:
        """The reply of these weights (default: the newest): log-probs, greedy ids, and the version."""
        self.whole(request, c)
        name = (weights or self.now).name
        self.logprobs(request, c.ids, c.logprobs, weights or self.now)
        if not request.sampling.temperature:
            fits = self.greedy_until(request, c, weights or self.now)
            assert fits == len(c.ids), f"greedy token {fits} (id {c.ids[fits]}) is not the most likely one under {name}"
        if weights is None:
            others = {tuple(v) for v in c.versions} - {tuple(self.version)}
            assert not others, f"versions {sorted(others)}: all tokens were drawn by {tuple(self.version)}"

    def logprobs(self, request: Request, ids: Sequence[int], found: Sequence[float], weights: Weights) -> None:
        """Equal the banned, tempered log-softmax of these weights within the tolerance."""
        if not ids:
            return
        from relax_core.torch.plain import full_logprobs

        heat = request.sampling.temperature or 1.0
        wanted = full_logprobs(self.adapter, weights.model, request.prompt, ids, heat)
        off = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        at, t = max(range(len(off)), key=lambda i: (off[i] != off[i], off[i])), self.tolerance
        self.differences += off
        assert off[at] <= t.largest, (
            f"log-probs at temperature {request.sampling.temperature:g} under weights {weights.name!r}: token {at} (id "
            f"{ids[at]}) has {found[at]:.4f}, the model in memory {wanted[at]:.4f}: {off[at]:.4f} apart "
            f"({self.dtype} allows {t.largest:g})"
        )

    def mean(self) -> None:
        """Of all differences of log-probs since the last call."""
        off, self.differences = self.differences, []
        if len(off) >= MEAN_OF:
            found, allowed = sum(off) / len(off), self.tolerance.mean
            assert found <= allowed, (
                f"log-probs and those of the model in memory are {found:.4f} apart on average of {len(off)} tokens "
                f"({self.dtype} allows {allowed:g})"
            )

    def equal_until(self, request: Request, c: Completion, weights: Weights) -> int:
        """How many of a greedy reply's log-probs, from its start, are those of these weights."""
        from relax_core.torch.plain import full_logprobs

        wanted = full_logprobs(self.adapter, weights.model, request.prompt, c.ids)
        off = (
            i for i, (a, b) in enumerate(zip(c.logprobs, wanted, strict=True)) if abs(a - b) > self.tolerance.largest
        )
        return next(off, len(c.ids))

    def greedy_until(self, request: Request, c: Completion, weights: Weights) -> int:
        """How many of a greedy reply's tokens, from its start, are the most likely ones under these weights.

        Ties are accepted within the tolerance.
        """
        import torch

        from relax_core.torch.plain import logprob_table

        table_NV = logprob_table(self.adapter, weights.model, request.prompt, c.ids)[:-1]
        chosen_N = table_NV.gather(-1, torch.tensor(c.ids, dtype=torch.long)[:, None])[:, 0]
        short_N = table_NV.max(-1).values - chosen_N > 2 * self.tolerance.largest
        return int(short_N.int().argmax()) if bool(short_N.any()) else len(c.ids)
