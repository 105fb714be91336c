"""Runs graders in worker processes: each job has a deadline, and whatever a job does, the others go on."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from relax_core.errors import RelaxError
from relax_envs.graders.process import WorkerProcess

BATCH = 8
"""Jobs that are sent to a worker at once, so that it need not wait for a pipe between them."""
MOST_SENDINGS = 3
"""Workers that may end before they begin a job, which is then taken for the reason."""
DEADLINE = 10.0
MEMORY = 2 << 30

Kind = Literal["deadline", "died", "raised", "start", "closed"]


class GraderError(RelaxError):
    """A job without a result. ``kind``: it overran its deadline, its process died, it raised, it cannot be started at
    all, or the pool was closed."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Pool:
    """``workers`` processes, started when the first job comes, for the ``functions`` (``module:function``) named here.

    A function takes and returns what JSON can say. Any thread and any event loop may use the pool. A worker that
    overruns a job's ``deadline`` (seconds, from the start of that job) is killed and replaced, one that dies is
    replaced: that job fails with GraderError, others that the worker had are given to the next one. ``memory``: bytes
    of address space a worker may use, where the system enforces it. The processes end with ``close``, with the pool,
    and with this process, however that ends; a fork of this process starts its own.
    """

    def __init__(
        self,
        functions: Collection[str],
        *,
        workers: int = 2,
        deadline: float = DEADLINE,
        memory: int | None = MEMORY,
    ) -> None:
        self.functions, self.workers, self.deadline, self.memory = tuple(functions), workers, deadline, memory
        self._crews: dict[int, _Crew] = {}  # by process id: that of a parent cannot be used after a fork
        self._finalizer = weakref.finalize(self, _close, self._crews)

    def submit(self, function: str, *arguments: Any, deadline: float | None = None) -> Future[Any]:
        """Queues one call. Its future raises GraderError; cancelling it works until it is sent to a worker."""
        return self.submit_many(function, [arguments], deadline=deadline)[0]

    def submit_many(
        self, function: str, calls: Sequence[Sequence[Any]], *, deadline: float | None = None
    ) -> list[Future[Any]]:
        """Queues several calls of a function at once.

        Raises ValueError for a function that the pool was not made for, TypeError for arguments that are no JSON.
        """
        if function not in self.functions:
            raise ValueError(
                f"graders: {function!r} is none of this pool's functions; it has {', '.join(self.functions)}"
            )
        seconds = self.deadline if deadline is None else deadline
        jobs = [Job(function, json.dumps([function, list(c)]).encode() + b"\n", seconds) for c in calls]
        self._crew().put(jobs)
        return [job.future for job in jobs]

    async def run(self, function: str, *arguments: Any, deadline: float | None = None) -> Any:
        """The result of one call. Raises GraderError."""
        return await asyncio.wrap_future(self.submit(function, *arguments, deadline=deadline))

    async def run_many(
        self, function: str, calls: Sequence[Sequence[Any]], *, deadline: float | None = None
    ) -> list[Any | BaseException]:
        """The results of several calls, in order; a GraderError in the place of each that has none."""
        futures = [asyncio.wrap_future(f) for f in self.submit_many(function, calls, deadline=deadline)]
        return await asyncio.gather(*futures, return_exceptions=True)

    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [p.pid for p in self._crew().processes.values() if p.alive]

    def close(self) -> None:
        """Ends the workers; jobs without a result fail. The pool cannot be used again."""
        self._finalizer()

    def _crew(self) -> _Crew:
        if not self._finalizer.alive:
            raise GraderError("closed", "graders: the pool is closed")
        me = os.getpid()
        if me not in self._crews:
            for inherited in list(self._crews.values()):
                inherited.forget()
            # One of several threads that come here at once wins; the crews of the others never start.
            self._crews.setdefault(me, _Crew(self.functions, self.workers, self.memory))
        return self._crews[me]


@dataclass(slots=True)
class Job:
    """A call on its way. ``line`` is what the worker reads."""

    function: str
    line: bytes
    deadline: float
    future: Future[Any] = field(default_factory=Future)
    sent: bool = False
    sendings: int = 0
    """How often it was the next job of a worker that ended."""

    def claim(self) -> bool:
        """Whether it is still wanted, now that a worker could have it."""
        self.sent = self.sent or self.future.set_running_or_notify_cancel()
        return self.sent

    def finish(self, reply: dict[str, Any]) -> None:
        if "value" in reply:
            self.future.set_result(reply["value"])
        else:
            self.fail("raised", reply.get("raised", "an answer that is none"))

    def fail(self, kind: Kind, text: str) -> None:
        self.future.set_exception(GraderError(kind, f"grader {self.function}: {text}"))


def _finish_first(waiting: deque[Job], reply: dict[str, Any]) -> None:
    waiting.popleft().finish(reply)


class _Crew:
    """The queue and the threads of one process, a thread for each worker. Holds no reference to its pool."""

    def __init__(self, functions: Sequence[str], workers: int, memory: int | None) -> None:
        self.functions, self.workers, self.memory = functions, workers, memory
        self.processes: dict[int, WorkerProcess] = {}
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            if self._closed:
                raise GraderError("closed", "graders: the pool is closed")
            self._queue.extend(jobs)
            for _ in range(min(self.workers - len(self._threads), max(0, len(self._queue) - self._idle))):
                thread = threading.Thread(target=self._work, args=[len(self._threads)], daemon=True, name="grader")
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left = list(self._queue)
            self._queue.clear()
            for process in self.processes.values():
                process.kill()  # its thread sees the end of the output, and returns
            self._changed.notify_all()
        for job in left:
            if job.claim():
                job.fail("closed", "the pool was closed")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(15)

    def forget(self) -> None:
        """In a fork: gives up the parent's pipes, without a word to its workers."""
        for process in list(self.processes.values()):
            process.forget()
        self.processes.clear()

    def _work(self, place: int) -> None:
        """One thread: takes jobs and has its worker do them, until the pool is closed."""
        while batch := self._take():
            process = self._process(place)
            if isinstance(process, str):
                for job in batch:
                    job.fail("closed" if self._closed else "start", f"no worker can be started: {process}")
                continue
            waiting = deque(batch)
            problem = process.exchange([(j.line, j.deadline) for j in batch], partial(_finish_first, waiting))
            if problem is not None:
                self._drop(place, process)
                self._blame(waiting, problem, process.begun)
        if process_left := self.processes.get(place):
            self._drop(place, process_left)

    def _take(self) -> list[Job]:
        """Waits for jobs, and leaves the other workers their share; none when the pool is closed."""
        with self._changed:
            while not self._closed:
                batch: list[Job] = []
                share = min(BATCH, -(-len(self._queue) // self.workers))
                while self._queue and len(batch) < share:
                    job = self._queue.popleft()
                    if job.claim():
                        batch.append(job)
                if batch:
                    return batch
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return []

    def _blame(self, waiting: deque[Job], problem: str, begun: bool) -> None:
        """The first job without a reply is what the worker was at, if it had begun; the others are done by the next."""
        if waiting:
            waiting[0].sendings += 1
        if waiting and problem != "last" and (begun or waiting[0].sendings == MOST_SENDINGS):
            job = waiting.popleft()
            if self._closed:
                job.fail("closed", "the pool was closed")
            elif problem == "deadline":
                job.fail("deadline", f"it took more than {job.deadline:g} s, and was ended")
            else:
                job.fail("died", problem)
        with self._changed:
            closed = self._closed
            if not closed:
                self._queue.extendleft(reversed(waiting))
                self._changed.notify_all()
        for job in waiting if closed else ():
            job.fail("closed", "the pool was closed")

    def _process(self, place: int) -> WorkerProcess | str:
        """The worker of this thread, started if there is none that lives; or why it cannot be."""
        process = self.processes.get(place)
        if process is not None:
            if process.alive:
                return process
            self._drop(place, process)
        try:
            with self._changed:  # so that ``close`` misses none
                if self._closed:
                    return "the pool was closed"
                process = self.processes[place] = WorkerProcess(self.functions, self.memory)
        except OSError as error:
            return str(error)
        problem = process.ready()
        if problem is not None:
            self._drop(place, process)
            return problem
        return process

    def _drop(self, place: int, process: WorkerProcess) -> None:
        with self._changed:
            self.processes.pop(place, None)
        process.close()


def _close(crews: dict[int, _Crew]) -> None:
    """Ends the workers of this process; those of a parent are its own."""
    if crew := crews.get(os.getpid()):
        crew.close()
