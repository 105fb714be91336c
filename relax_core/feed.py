"""The feed of the rollout: tasks in training order, read, decoded and encoded ahead of it by a bounded pool of threads.

Rows that cannot be used are skipped here, counted and named; which ones depends on the data alone, so a resumed run
skips the same. How far the pool works ahead is bounded in tasks and in bytes of media.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from relax_core.bad_rows import BadRows
from relax_core.content_hash import content_hash
from relax_core.errors import ConfigError, DataError
from relax_core.prompts import TooLong
from relax_core.tasks import located

if TYPE_CHECKING:
    from relax_core.config.schema import DataSection
    from relax_core.prompts import Prompt, Prompts
    from relax_core.tasks import Candidate, TaskStream


class Feed:
    """``await take(position)`` gives a prompt. One event loop uses it; the threads only make prompts."""

    def __init__(
        self,
        stream: TaskStream,
        prompts: Prompts,
        settings: DataSection,
        groups_per_step: int,
        note: Callable[[str], None] = print,
    ) -> None:
        self.stream, self.prompts, self.settings = stream, prompts, settings
        self.media = prompts.adapter.media
        self.ahead = settings.ahead or groups_per_step
        sizes: Counter[str] = Counter()
        for name, tasks in stream.tasks.items():
            sizes[stream.environments[name]] += len(tasks)
        self.bad = BadRows(settings.max_bad_fraction, sizes, note)
        self.counts: Counter[str] = Counter()
        """Prompts that were ``cut``, and those left out as ``too_long``."""
        self._held_out: dict[str, str] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._lanes = {name: _Lane() for name in stream.tasks}
        self._next = 0  # positions before this one were asked for
        self._reach = 0  # positions before this one have a candidate at work or made
        self._at_work = 0
        self._made_bytes = 0  # of prompts that are made and not yet taken

    def hold_out(self, hashes: Collection[str], evaluation: str) -> None:
        """From now on a task with one of these content hashes is an error: it is held out for ``evaluation``."""
        self._held_out |= dict.fromkeys(hashes, evaluation)

    async def take(self, position: int) -> Prompt:
        """The prompt at a position, its media retained: release ``prompt.keys``. Positions may be asked for again.

        Raises DataError when too many rows are bad, ConfigError when a task is held out for an evaluation or a prompt
        is too long where that ends the run; whatever an environment raises besides passes through.
        """
        if position < self._next:
            return await self._again(position)
        while self._next < position:  # passed over, to find which rows count
            self.media.release((await self.take(self._next)).keys)
        stream, _ = self.stream.place(position)
        lane = self._lanes[stream]
        self._next, self._reach = position + 1, max(self._reach, position + 1)
        for _ in range(len(self.stream.tasks[stream]) + 1):
            if not lane.waiting:
                self._submit(stream)
            candidate, future = lane.waiting.popleft()
            lane.seen += 1
            try:
                prompt = await future
            except DataError as error:
                self._skip(candidate, error)
                latest = error
                continue
            self._made_bytes -= self.media.size(prompt.keys)
            self.counts["cut"] += prompt.cut
            self._work_ahead()
            return prompt
        raise DataError(f"{latest}: and no other row of {stream!r} can be used: mend the data, or its limits")

    async def _again(self, position: int) -> Prompt:
        """A prompt that was taken before: its group was evicted, or was in flight when the run ended."""
        candidate = self.stream.known(*self.stream.place(position))
        return await asyncio.get_running_loop().run_in_executor(self._workers(), self._make, candidate)

    def close(self) -> None:
        """End the threads when they are done with what they are at; what is waiting is given up."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    # --- working ahead ------------------------------------------------------------------------------------------------

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.settings.workers, thread_name_prefix="feed")
        return self._pool

    def _submit(self, stream: str) -> None:
        """Let a thread make the stream's next candidate."""
        lane = self._lanes[stream]
        candidate = self.stream.candidate(stream, lane.number)
        lane.number += 1
        if self.bad.knows(stream, candidate.index):
            future: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
            future.set_exception(DataError(self.bad.reason(stream, candidate.index)))
            future.exception()  # or asyncio complains of one that nobody gets to wait for
        else:
            self._at_work += 1
            future = asyncio.get_running_loop().run_in_executor(self._workers(), self._make, candidate)
            future.add_done_callback(self._done)
        lane.waiting.append((candidate, future))

    def _done(self, future: asyncio.Future[Prompt]) -> None:
        self._at_work -= 1
        if future.cancelled() or future.exception() is not None:  # seen by whoever waits for it
            return
        self._made_bytes += self.media.size(future.result().keys)
        self._work_ahead()

    def _work_ahead(self) -> None:
        """Keep every thread busy while tasks and bytes that are ready stay within their bounds."""
        room = self.settings.media_bytes // 2
        while not self._closed and (
            self._reach < self._next + self.ahead and self._at_work < self.settings.workers and self._made_bytes < room
        ):
            stream, _ = self.stream.place(self._reach)
            self._reach += 1
            self._submit(stream)

    def _make(self, candidate: Candidate) -> Prompt:
        """In a thread: read, decode and encode."""
        task = self.stream.task(candidate)
        if self._held_out and (evaluation := self._held_out.get(content_hash(task))):
            raise ConfigError(
                f"environments.{task.environment}: training task {task.id!r} is also in evaluation {evaluation!r}: "
                "split the data, or set disjoint: false there"
            )
        try:
            return self.prompts.make(task)
        except DataError as error:
            raise located(self.stream.tasks[candidate.stream], candidate.index, error) from error

    # --- bad rows -----------------------------------------------------------------------------------------------------

    def _skip(self, candidate: Candidate, error: DataError) -> None:
        self.stream.skip(candidate)
        if isinstance(error, TooLong):
            self.counts["too_long"] += 1
            return
        environments, environment = self.stream.environments, self.stream.environments[candidate.stream]
        lanes = ((s, lane) for s, lane in self._lanes.items() if environments[s] == environment)
        seen = sum(min(lane.seen, len(self.stream.tasks[s])) for s, lane in lanes)
        self.bad.add(environment, candidate.stream, candidate.index, str(error), seen)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON values: which rows were skipped, and why."""
        return {"skipped": self.stream.skipped, "counts": dict(self.counts), "bad": self.bad.state()}

    def restore(self, state: Mapping[str, Any], position: int) -> None:
        """Go on at ``position``, the first that was not asked for."""
        for stream, numbers in state["skipped"].items():
            if stream in self.stream.skipped:
                self.stream.skipped[stream] = list(numbers)
        self.counts.update(state["counts"])
        self.bad.restore(state["bad"])
        self._next = self._reach = position
        taken: Counter[str] = Counter(self.stream.place(i)[0] for i in range(position))
        for stream, lane in self._lanes.items():
            if taken[stream]:
                lane.number = lane.seen = self.stream.known(stream, taken[stream] - 1).number + 1


class _Lane:
    """Candidates of one stream at work or made, in its order.

    ``number``: of the next one. ``seen``: how many were found to be good or bad.
    """

    def __init__(self) -> None:
        self.number = self.seen = 0
        self.waiting: deque[tuple[Candidate, asyncio.Future[Prompt]]] = deque()
