"""An engine without cache and batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.keys import draw_stream, uniform
from relax_core.setup import EngineSetup
from relax_core.torch.plain import logprob_table
from relax_core.torch.swap import take_weights
from relax_core.types import Stop, Version
from relax_core.weights import WeightUpdate

from relax_plugin_template.engine_config import PlainConfig


@dataclass(eq=False)
class Row:
    """A request, and what was drawn for it."""

    request: Request
    done: asyncio.Future[Completion]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    def end(self, stop: Stop) -> None:
        if not self.done.done():
            self.done.set_result(Completion(self.ids, self.logprobs, self.versions, stop))


class PlainEngine(Engine):
    """Runs the whole row through the model for each token."""

    exact_versions = True
    Config = PlainConfig

    def __init__(self, config: PlainConfig, setup: EngineSetup) -> None:
        super().__init__(config)
        self.setup, self.adapter = setup, setup.adapter
        self.dead: str | None = "it was not started"
        self.running: list[Row] = []
        self.waiting: list[Row] = []
        self.held: set[str] = set()
        """Why nothing is decoded (pause, sleep), or nobody is admitted (drain)."""
        self.task: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        await self.stop()
        self.model = self.adapter.load(self.config.device, torch.float32).eval().requires_grad_(False)
        self.version, self.dead = Version(0, 0), None
        self.held.clear()
        self.task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        self._die("it was stopped")

    def _die(self, reason: str) -> None:
        self.dead, self.task = self.dead or reason, None
        for row in [*self.running, *self.waiting]:
            if not row.done.done():
                row.done.set_exception(EngineError(f"plain engine: request lost: {self.dead}"))

    def _alive(self) -> None:
        if self.dead is not None:
            raise EngineError(f"plain engine: it cannot serve: {self.dead}; start it again")

    async def health(self) -> Mapping[str, float]:
        self._alive()
        counts = {"running": len(self.running), "waiting": len(self.waiting), "version": self.version.number}
        return {name: float(count) for name, count in counts.items()}

    # --- requests ---

    async def generate(self, request: Request) -> Completion:
        self._alive()
        row = Row(request, asyncio.get_running_loop().create_future())
        self.waiting.append(row)
        try:
            return await row.done
        finally:  # also when the caller cancels
            for rows in (self.running, self.waiting):
                if row in rows:
                    rows.remove(row)

    async def _serve(self) -> None:
        try:
            while True:
                if not self.held:
                    self.running += self.waiting
                    self.waiting.clear()
                if not self.held - {"drain"}:
                    for row in self.running:
                        if not row.done.done():
                            self._draw(row)
                await asyncio.sleep(0 if self.running else 0.001)
        except Exception as error:
            self._die(f"{type(error).__name__}: {error}")

    def _draw(self, row: Row) -> None:
        """One token: the first whose cumulative probability exceeds the number of its key and place."""
        request, heat = row.request, row.request.sampling.temperature
        if request.sampling.top_p < 1 or request.sampling.top_k:
            row.done.set_exception(EngineError("plain engine: it has no top_p and no top_k; leave them out"))
            return
        place = request.drawn + len(row.ids)
        logprobs_V = logprob_table(self.adapter, self.model, request.prompt, row.ids, heat)[-1]
        cumulative_V = logprobs_V.exp().cumsum(-1)
        number = uniform(draw_stream(self.setup.seed, request.key), place) * float(cumulative_V[-1])
        token = int((cumulative_V > number).int().argmax() if heat else logprobs_V.argmax())
        row.ids.append(token)
        row.logprobs.append(float(logprobs_V[token]))
        row.versions.append(self.version)
        if token in self.adapter.stop_ids:
            row.end(Stop.EOS)
        elif place + 1 == request.sampling.max_new_tokens:
            row.end(Stop.LENGTH)

    # --- weights and memory ---

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        self._alive()
        if interrupt == "drain":
            self.held.add("drain")
        try:
            weights = list(update.tensors())  # every one is verified before the first is served
            while interrupt == "drain" and self.running:
                await asyncio.sleep(0.001)
                self._alive()
            take_weights(self.model, weights)
            if interrupt == "abort":
                self._give_back()
            self.version = update.manifest.version
        finally:
            self.held.discard("drain")

    def _give_back(self) -> None:
        for row in self.running:
            row.end(Stop.ABORT)

    async def pause(self) -> None:
        self.held.add("pause")

    async def resume(self) -> None:
        self.held.discard("pause")

    async def sleep(self) -> None:
        self._give_back()
        self.held.add("sleep")

    async def wake(self) -> None:
        self.held.discard("sleep")
