"""Which replica is the least loaded, and which one served a conversation before: the router's two memories."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from relax_core.interfaces import Request


def cost(request: Request) -> int:
    """Tokens that a request may still need, its prompt included: what was drawn of its turn is done."""
    return len(request.prompt.ids) + max(0, request.sampling.max_new_tokens - request.drawn)


class Loads:
    """Outstanding tokens of each replica; the least loaded one in service in O(log n), equal ones by their place.

    Every change pushes what is true now on a heap; an entry that is no longer true is dropped when it comes to the top.
    """

    def __init__(self, count: int) -> None:
        self.tokens = [0] * count
        self.requests = [0] * count
        self._serving = [False] * count
        self._heap: list[tuple[int, int]] = []

    def join(self, index: int) -> None:
        self._serving[index] = True
        heappush(self._heap, (self.tokens[index], index))

    def leave(self, index: int) -> None:
        self._serving[index] = False

    def begin(self, index: int, tokens: int) -> None:
        self.requests[index] += 1
        self._change(index, tokens)

    def end(self, index: int, tokens: int) -> None:
        self.requests[index] -= 1
        self._change(index, -tokens)

    def least(self) -> int | None:
        """None when no replica is in service."""
        heap = self._heap
        while heap:
            tokens, index = heap[0]
            if self._serving[index] and tokens == self.tokens[index]:
                return index
            heappop(heap)
        return None

    def _change(self, index: int, tokens: int) -> None:
        self.tokens[index] += tokens
        if self._serving[index]:
            heappush(self._heap, (self.tokens[index], index))
            if len(self._heap) > 8 * len(self.tokens) + 64:
                self._heap = [(t, i) for i, t in enumerate(self.tokens) if self._serving[i]]
                heapify(self._heap)


class Homes:
    """Where conversations were served last: the ``size`` ones that were used last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._homes: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, conversation: Hashable) -> tuple[int, int] | None:
        """The replica and its incarnation: one that was started anew remembers nothing."""
        return self._homes.get(conversation)

    def set(self, conversation: Hashable, index: int, incarnation: int) -> None:
        self._homes[conversation] = (index, incarnation)
        self._homes.move_to_end(conversation)
        if len(self._homes) > self.size:
            self._homes.popitem(last=False)
