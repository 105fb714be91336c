"""An engine without a model: what it answers is given to it, for checks, tests and plays by hand."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.types import Encoded, Stop, Version

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_core.weights import WeightUpdate

Say = Callable[[Request], Sequence[int] | Awaitable[Sequence[int]]]
"""The ids of the reply to a request, its end of turn included; EngineError: there are no more replies."""


class ScriptedEngine(Engine):
    """Answers what ``say`` gives, as sampled by version 0 with log-prob 0; cut at the request's limit.

    ``stop_ids``: what ends a reply that is whole (``ModelAdapter.stop_ids``). When ``say`` raises EngineError it is
    dead, which ends a play instead of becoming an error of it.
    """

    def __init__(self, say: Say, stop_ids: frozenset[int]) -> None:
        super().__init__(None)
        self.say, self.stop_ids = say, stop_ids
        self.prompt = Encoded([])
        """Of the newest request."""
        self.dead: EngineError | None = None

    async def generate(self, request: Request) -> Completion:
        self.prompt = request.prompt
        try:
            said = self.say(request)
            whole = await said if inspect.isawaitable(said) else said
        except EngineError as error:
            self.dead = error
            raise
        ids = list(whole)[: request.sampling.max_new_tokens - request.drawn]
        n, ended = len(ids), bool(ids) and ids[-1] in self.stop_ids
        return Completion(ids, [0.0] * n, [Version(0, 0)] * n, Stop.EOS if ended else Stop.LENGTH)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        if self.dead is not None:
            raise self.dead
        return {"running": 0.0, "waiting": 0.0, "version": 0.0}


def one_by_one(replies: Iterable[str], adapter: ModelAdapter) -> Say:
    """Each text in its turn; a further request is an EngineError. Text that the model cannot say is a DataError."""
    rest, given = iter(replies), 0

    def say(request: Request) -> Sequence[int]:
        nonlocal given
        for text in rest:
            given += 1
            return adapter.reply(text)
        raise EngineError(f"scripted replies: a reply was asked for after all {given} that there are: give more")

    return say
