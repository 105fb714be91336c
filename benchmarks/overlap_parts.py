"""The overlap benchmark's model, and the embedded engine and trainer with meters: apart, since they import torch."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.overlap_config import MeteredEngineConfig, MeteredTrainerConfig
from relax_core.interfaces import StepResult
from relax_core.models.text import TextAdapter
from relax_core.torch.engine import TorchEngine
from relax_core.torch.trainer import TorchTrainer

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.interfaces import Algorithm, Cut, Interrupt, Pool
    from relax_core.media import MediaStore
    from relax_core.models.config import TextConfig
    from relax_core.setup import EngineSetup, TrainerSetup
    from relax_core.weights import WeightUpdate


class Endless(TextAdapter):
    """Never ends a reply by itself: its end token is banned."""

    def __init__(self, config: TextConfig, media: MediaStore, seed: int = 0) -> None:
        super().__init__(config, media, seed)
        self.banned_token_ids = tuple(sorted({*self.banned_token_ids, *self.stop_ids}))
        self.stop_ids = frozenset()


def note(log: str, **values: Any) -> None:
    """Add a line with the time on the clock that all processes share, and this process's CPU seconds."""
    line = {"at": time.monotonic(), "pid": os.getpid(), "cpu_s": time.process_time(), **values}
    with Path(log).open("a") as file:
        file.write(json.dumps(line) + "\n")


class MeteredEngine(TorchEngine):
    """Notes its busy seconds: those in which it decodes or takes weights over."""

    config: MeteredEngineConfig

    def __init__(self, config: MeteredEngineConfig, setup: EngineSetup) -> None:
        super().__init__(config, setup)
        self._busy = 0.0
        self._decodes = 0

    def _step(self, pool: Pool) -> None:
        start = time.perf_counter()
        super()._step(pool)
        self._busy += time.perf_counter() - start
        self._decodes += 1

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        start = time.perf_counter()
        await super().load_weights(update, interrupt)
        self._busy += time.perf_counter() - start
        self._note()

    async def stop(self) -> None:
        if self.decoder is not None:
            self._note()
        await super().stop()

    def _note(self) -> None:
        drawn = self.decoder.drawn if self.decoder is not None else 0
        note(self.config.log, busy_s=self._busy, decodes=self._decodes, drawn=drawn)


class MeteredTrainer(TorchTrainer):
    """Notes of each step how long it took, and how long of that it waited for rows; and the seconds of publications."""

    config: MeteredTrainerConfig

    def __init__(self, config: MeteredTrainerConfig, setup: TrainerSetup) -> None:
        super().__init__(config, setup)
        self._waited = self._published = 0.0

    async def step(self, step: int, plan: AsyncIterator[Cut] | None, algorithm: Algorithm) -> StepResult:
        if plan is None:  # of another rank than rank 0
            return await super().step(step, plan, algorithm)
        start, self._waited = time.perf_counter(), 0.0
        if self.config.rest_s is None:
            result = await super().step(step, self._timed(plan), algorithm)
        else:
            result = await self._rest(self._timed(plan), self.config.rest_s)
        seconds = time.perf_counter() - start
        note(self.config.log, step=step, step_s=seconds, wait_s=self._waited, published_s=self._published)
        return result

    async def _rest(self, plan: AsyncIterator[Cut], seconds: float) -> StepResult:
        """Take a step's cuts as if they were trained: each takes its rows' share of the time."""
        rows = self.run.config.groups_per_step * self.run.config.group_size
        cuts = []
        async for cut in plan:
            await asyncio.sleep(seconds * len(cut.rows) / rows)
            cuts.append(([row.id for row in cut.rows], cut.last))
        return StepResult({}, (True,), cuts)

    async def _timed(self, plan: AsyncIterator[Cut]) -> AsyncIterator[Cut]:
        asked = time.perf_counter()
        async for cut in plan:
            self._waited += time.perf_counter() - asked
            yield cut
            asked = time.perf_counter()
        self._waited += time.perf_counter() - asked

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        start = time.perf_counter()
        yield from super().weights()
        self._published += time.perf_counter() - start
