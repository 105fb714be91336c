"""A trainer that computes in a thread of its own, so that the event loop of its process goes on with everything else.

For a runtime whose engine has its own process: publications, plays and scores advance while the trainer computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from relax_core.interfaces import Algorithm, Columns, Cut, Row, StepResult, Trainer

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Aside(Trainer):
    """``trainer`` behind the same interface; ``close`` ends the thread.

    The plan is asked for its next cut in the caller's loop, and only while the trainer waits for it: what the two share
    (costs, weights) is never used by both at once.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.config)
        self.trainer = trainer
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="trainer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @property
    def budget(self) -> int:
        return self.trainer.budget

    def cost(self, rows: Sequence[Row]) -> int:
        return self.trainer.cost(rows)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        return await self._there(self.trainer.forward(rows, outputs))

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        cuts = _from(plan, asyncio.get_running_loop())
        return await self._there(self.trainer.step(step, cuts, algorithm))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.trainer.weights()

    def frozen_names(self) -> frozenset[str]:
        return self.trainer.frozen_names()

    async def sleep(self) -> None:
        await self._there(self.trainer.sleep())

    async def wake(self) -> None:
        await self._there(self.trainer.wake())

    def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    def load(self, folder: Path) -> None:
        self.trainer.load(folder)


async def _from(plan: AsyncIterator[Cut], loop: asyncio.AbstractEventLoop) -> AsyncIterator[Cut]:
    """The plan, which runs in ``loop``, for another one."""
    while (cut := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_next(plan), loop))) is not None:
        yield cut


async def _next(plan: AsyncIterator[Cut]) -> Cut | None:
    return await anext(plan, None)
