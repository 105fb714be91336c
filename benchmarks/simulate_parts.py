"""Engine, trainer, model and environment that compute nothing: they take the time that the costs say, in virtual time.

Their own CPU time is counted in a ``Meter``, so that it can be taken from that of the process: the rest is Relax's.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.simulate_costs import Costs, response_length, tool_seconds
from relax_core.errors import EngineError
from relax_core.interfaces import (
    Algorithm,
    Completion,
    ComponentConfig,
    Cut,
    Engine,
    Environment,
    Extended,
    Interrupt,
    ModelAdapter,
    Request,
    Reward,
    Row,
    StepResult,
    Trainer,
)
from relax_core.keys import stream, uniform
from relax_core.types import Encoded, Message, Stop, Task, Trajectory, Version, user

if TYPE_CHECKING:
    from pathlib import Path

    from relax_core.chat import Chat
    from relax_core.weights import WeightUpdate


@dataclass
class Meter:
    """CPU seconds of this thread by what took them: ``with meter("engine"): ...`` (not nested, nothing awaited)."""

    seconds: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds[name] += time.thread_time() - began  # type: ignore[assignment]


def chance(seed: int, *names: Any) -> float:
    """A number in [0, 1) that belongs to these names."""
    return uniform(stream(seed, *names), 0)


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Play:
    request: Request
    tokens: int
    future: asyncio.Future[Completion]
    began: float = 0.0
    """Decoding steps that the engine had done when it was admitted."""
    versions: list[tuple[int, Version]] = field(default_factory=list)
    """How many of its tokens were drawn when each version came."""


class SimulatedEngine(Engine):
    """Continuous batching: all rows that run gain a token in each decoding step; a prompt is read before the next step.

    Between two events time flows evenly, so a row may join in the middle of a step. ``busy_s``: virtual seconds in
    which it computed. Weights take ``load_s`` during which nothing is decoded.
    """

    exact_versions = True

    def __init__(self, costs: Costs, slots: int, seed: int, meter: Meter) -> None:
        super().__init__(None)
        self.costs, self.slots, self.seed, self.meter = costs, slots, seed, meter
        self.version = Version(0, 0)
        self.busy_s = 0.0
        self._done = self._debt = self._at = 0.0  # decoding steps; seconds of prompts to read; when both were true
        self._running: list[tuple[float, int, _Play]] = []
        self._waiting: list[tuple[tuple[int, ...], int, _Play]] = []
        self._cached: dict[tuple[Any, ...], int] = {}  # tokens of conversations that went on here
        self._number = count()
        self._stopped: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._asked = False

    async def generate(self, request: Request) -> Completion:
        with self.meter("engine"):
            loop = asyncio.get_running_loop()
            length = response_length(chance(self.seed, "length", *request.key), request.sampling.max_new_tokens)
            play = _Play(request, length, loop.create_future())
            heapq.heappush(self._waiting, (request.order, next(self._number), play))
            self._look_soon(loop)
        return await play.future

    def _look_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._asked:
            self._asked = True
            loop.call_soon(self._look)

    def advance(self) -> None:
        """Do what was to be done until now."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        if passed > 0 and self._running and not self._stopped:
            self.busy_s += passed
            read = min(self._debt, passed)
            self._debt -= read
            self._done += (passed - read) / self._step_s

    @property
    def _step_s(self) -> float:
        return self.costs.step_s + self.costs.row_s * len(self._running)

    def _look(self) -> None:
        with self.meter("engine"):
            self._asked = False
            self.advance()
            while self._running and self._running[0][0] <= self._done + 1e-6:
                self._end(heapq.heappop(self._running)[2])
            while self._waiting and len(self._running) < self.slots and not self._stopped:
                self._admit(heapq.heappop(self._waiting)[2])
            self._set_timer()

    def _admit(self, play: _Play) -> None:
        request, conversation = play.request, play.request.key[:3]
        self._debt += self.costs.prefill_s * (len(request.prompt.ids) - self._cached.pop(conversation, 0))
        play.began, play.versions = self._done, [(0, self.version)]
        heapq.heappush(self._running, (self._done + play.tokens, next(self._number), play))

    def _end(self, play: _Play) -> None:
        self._cached[play.request.key[:3]] = len(play.request.prompt.ids) + play.tokens
        if len(self._cached) > 4 * self.slots:
            del self._cached[next(iter(self._cached))]
        versions: list[Version] = []
        for (first, version), (end, _) in zip(play.versions, [*play.versions[1:], (play.tokens, None)], strict=True):
            versions += [version] * (end - first)
        stop = Stop.LENGTH if play.tokens == play.request.sampling.max_new_tokens else Stop.EOS
        if not play.future.done():
            play.future.set_result(Completion([5] * play.tokens, [-1.0] * play.tokens, versions, stop))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._stopped:
            seconds = self._debt + (self._running[0][0] - self._done) * self._step_s
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._look)

    def _stop(self, why: str) -> None:
        self.advance()
        self._stopped.add(why)
        self._set_timer()

    def _go_on(self, why: str) -> None:
        self.advance()
        self._stopped.discard(why)
        self._look_soon(asyncio.get_running_loop())

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        if interrupt != "continue":
            raise EngineError(f"engine: the simulated one knows interrupt: continue, not {interrupt!r}")
        with self.meter("engine"):
            self._stop("weights")
        await asyncio.sleep(self.costs.load_s)
        with self.meter("engine"):
            self.version = update.manifest.version
            for _, _, play in self._running:
                play.versions.append((min(play.tokens, int(self._done - play.began + 1e-6)), self.version))
            self._go_on("weights")

    async def sleep(self) -> None:
        self._stop("asleep")

    async def wake(self) -> None:
        self._go_on("asleep")

    async def health(self) -> Mapping[str, float]:
        return {"running": float(len(self._running)), "waiting": float(len(self._waiting))}


# --- the trainer ------------------------------------------------------------------------------------------------------


class Enough(Exception):
    """What was to be measured is measured: ends the run in its midst, as an interruption would."""


class SimulatedTrainer(Trainer):
    """``ranks`` that share each micro-batch evenly, but for rows, which stay whole. ``lags``: trained tokens by lag."""

    def __init__(self, costs: Costs, ranks: int, tokens_per_micro_batch: int, meter: Meter) -> None:
        super().__init__(None)
        self.costs, self.ranks, self.meter = costs, ranks, meter
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.busy_s = 0.0
        self.rows = 0
        self.over = False
        """Whether the next step raises ``Enough``."""
        self.lags: Counter[int] = Counter()

    @property
    def budget(self) -> int:
        return self.tokens_per_micro_batch * self.ranks

    def cost(self, rows: Sequence[Row]) -> int:
        return sum(len(row.columns["tokens"]) for row in rows)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Mapping[str, Any]]:
        raise NotImplementedError("nothing asks the simulated trainer for columns")

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        if self.over:
            raise Enough
        cuts = []
        async for cut in plan:
            cuts.append(([row.id for row in cut.rows], cut.last))
            if cut.rows:
                with self.meter("trainer"):
                    seconds = self._seen(step, cut.rows)
                self.busy_s += seconds
                await asyncio.sleep(seconds)
        return StepResult({"loss": 0.0}, moved=(True,), cuts=cuts)

    def _seen(self, step: int, rows: Sequence[Row]) -> float:
        import numpy as np

        lengths = [len(row.columns["tokens"]) for row in rows]
        sampled = np.concatenate([row.columns["versions"][row.columns["mask"] > 0] for row in rows])
        for version, n in zip(*np.unique(sampled, return_counts=True), strict=True):
            self.lags[step - int(version)] += int(n)
        self.rows += len(rows)
        return self.costs.cut_s + self.costs.train_s * max(sum(lengths) / self.ranks, max(lengths))

    def weights(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def save(self, folder: Path) -> None:
        """There is nothing."""

    def load(self, folder: Path) -> None:
        """There is nothing."""


# --- what is played ---------------------------------------------------------------------------------------------------


class ModelConfig(ComponentConfig):
    prompt: int = 64
    """Tokens of a prompt."""
    observation: int = 16
    """Tokens of a tool's answer."""


class SimulatedModel(ModelAdapter):
    """A fixed number of tokens for each message."""

    Config = ModelConfig
    pad_id, vocab_size = 0, 16
    stop_ids: frozenset[int] = frozenset({1})
    banned_token_ids = ()

    def encode(self, history: Sequence[Message]) -> Encoded:
        return Encoded([7] * self.config.prompt)

    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended:
        return Extended(Encoded([6] * self.config.observation))

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the simulated model computes nothing")

    forward_inputs = load = backbone = head = save = _none


class EnvironmentConfig(ComponentConfig):
    tools: int = 0
    """Tools that a play calls; each takes time, and the policy answers again."""
    failed: float = 0.0
    """Share of groups of which every play fails."""
    seed: int = 0


class SimulatedEnvironment(Environment):
    """One reply, or one after each tool."""

    Config = EnvironmentConfig
    config: EnvironmentConfig

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return [Task(str(i), (user("task"),)) for i in range(1 << 12)]

    async def play(self, task: Task, chat: Chat) -> None:
        await chat(*task.messages)
        for i in range(self.config.tools):
            await asyncio.sleep(tool_seconds(chat.random("tool", i)))
            await chat("answer")
        if chance(self.config.seed, "failed", task.id) < self.config.failed:
            raise RuntimeError("a play fails")


class SimulatedReward(Reward):
    """0 or 1 by chance."""

    async def __call__(self, trajectory: Trajectory) -> float:
        return float(chance(0, "reward", trajectory.task.id, trajectory.member) < 0.5)
