"""Blocks of rows that are read at once: the few that stay in memory, and an order in which each is read about once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_envs.data.source import Part

T = TypeVar("T")

LANES = 4
"""Runs that a window takes parts of, at most."""


class Kept(Generic[T]):
    """The things used last, up to ``max_bytes`` of them and at least one. Each method is atomic."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._lock = threading.Lock()
        self._things: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()  # least recently used first

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            if key not in self._things:
                return None
            self._things.move_to_end(key)
            return self._things[key][0]

    def pop(self, key: Hashable) -> T | None:
        """Take it out."""
        with self._lock:
            thing, nbytes = self._things.pop(key, (None, 0))
            self.nbytes -= nbytes
            return thing

    def put(self, key: Hashable, thing: T, nbytes: int) -> None:
        """Add a thing, or replace it."""
        with self._lock:
            self.nbytes -= self._things.pop(key, (None, 0))[1]
            self._things[key] = (thing, nbytes)
            self.nbytes += nbytes
            self._shrink(0, 1)

    def make_room(self, nbytes: int) -> None:
        """Drop what would have to go if so much were added."""
        with self._lock:
            self._shrink(nbytes, 0)

    def _shrink(self, more: int, least: int) -> None:
        while self.nbytes + more > self.max_bytes and len(self._things) > least:
            _, (_, old) = self._things.popitem(last=False)
            self.nbytes -= old


class BlockCache:
    """The blocks used last, up to ``max_bytes`` of them and at least one, and what is open to read more. Thread-safe.

    A block is anything with ``nbytes``. Threads that want the same one share its reading.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.open: Kept[Any] = Kept(max_bytes // 2)
        self.reads = 0
        """Blocks read so far."""
        self._lock = threading.Lock()
        self._blocks: Kept[Any] = Kept(max_bytes)
        self._reading: dict[Hashable, Future[Any]] = {}

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    def peek(self, key: Hashable) -> Any | None:
        """The block under a key if it is there."""
        return self._blocks.get(key)

    def put(self, key: Hashable, block: Any) -> None:
        self._blocks.put(key, block, block.nbytes)
        self.reads += 1

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """The block under a key, read if it is not there. An error of ``read`` goes to all who wait."""
        with self._lock:
            if (block := self._blocks.get(key)) is not None:
                return block
            future = self._reading.get(key)
            mine = future is None
            if future is None:
                future = self._reading[key] = Future()
        if not mine:
            return future.result()
        try:
            block = read()
        except BaseException as error:
            with self._lock:
                del self._reading[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._reading[key]
            if self._blocks.get(key) is None:
                self.put(key, block)
        future.set_result(block)
        return block


def shuffled(size: int, runs: Sequence[Sequence[Part]], rng: np.random.Generator, max_bytes: int) -> NDArray[np.int64]:
    """A permutation of ``size`` rows in which neighbours are cheap to read.

    ``runs``: parts that are best read one after the other; together they hold every row once. Without runs, or when all
    rows together take no more than ``max_bytes``, it is a full permutation. Else the runs are shuffled, and their parts
    are dealt to windows of up to half of ``max_bytes``, in turn from up to ``LANES`` runs (fewer where reading a run
    holds much); rows are shuffled within their window. So the parts of a window fit into memory together.
    """
    import numpy as np

    if not runs or sum(part.nbytes for run in runs for part in run) <= max_bytes:
        return rng.permutation(size)
    pieces: list[NDArray[np.int64]] = []
    for window in _windows([runs[i] for i in rng.permutation(len(runs))], max_bytes // 2):
        rows = np.concatenate([np.arange(part.start, part.start + part.size) for part in window])
        pieces.append(rng.permutation(rows))
    return np.concatenate(pieces).astype(np.int64)


def _windows(runs: Sequence[Sequence[Part]], max_bytes: int) -> Iterator[list[Part]]:
    """Parts dealt to windows. Runs that hold too much to be read side by side are in different ones."""
    waiting = deque(deque(run) for run in runs if run)
    lanes: deque[deque[Part]] = deque()
    window: list[Part] = []
    nbytes = held = 0  # of the window's parts, and by the runs that they are from
    while waiting or lanes:
        while waiting and len(lanes) < LANES:
            fits = held + waiting[0][0].held <= max_bytes
            if fits or not (window or lanes):
                held += waiting[0][0].held
                lanes.append(waiting.popleft())
            elif lanes:
                break
            else:
                yield window
                window, nbytes, held = [], 0, 0
        part = lanes[0].popleft()
        if window and nbytes + part.nbytes > max_bytes:
            yield window
            window, nbytes, held = [], 0, sum(lane[0].held for lane in lanes if lane) + part.held * (not lanes[0])
        window.append(part)
        nbytes += part.nbytes
        lanes.rotate(-1)
        if not lanes[-1]:
            lanes.pop()
    yield window
