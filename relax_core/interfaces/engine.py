"""Sampling tokens."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from relax_core.errors import EngineError
from relax_core.interfaces.component import Columns, Configurable, Interrupt
from relax_core.types import DrawKey, Encoded, Sampling, Stop, Version

if TYPE_CHECKING:
    from relax_core.weights import WeightUpdate

Pool = Literal["train", "eval", "reward"]
"""Whose a request is: a training play's, an evaluation's, or a reward's that asks the engine."""
POOLS: tuple[Pool, ...] = get_args(Pool)


@dataclass(frozen=True, slots=True)
class Request:
    """Sample one turn. ``drawn`` counts the tokens of this turn that were sampled before (a continued prefix)."""

    id: str
    key: DrawKey
    prompt: Encoded
    sampling: Sampling
    order: tuple[int, ...] = ()
    """Requests that wait are admitted in this order."""
    pool: Pool = "train"
    """Batches never mix pools: neither evaluations nor rewards can change a training row's bits."""
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Lists have one entry per newly sampled token. ``extras`` holds per-token columns of an engine's own.

    Log-probs are those of the tempered softmax over all ids that are not banned, of greedy tokens at temperature 1.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    stop: Stop
    extras: Columns = field(default_factory=dict)


class Engine(Configurable, ABC):
    """Samples tokens."""

    exact_versions: bool = False
    """Whether versions are exact per token, or lower bounds."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion: ...

    @abstractmethod
    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        """Verify and take over published weights. Raises WeightsError; then the old ones stay.

        ``continue``: running requests go on with the new weights. ``abort``: they come back with Stop.ABORT.
        ``drain``: they finish first, and new ones wait.
        """

    def replicas(self) -> Sequence[Engine]:
        """The engines that it spreads requests over, of which each can be asked by itself; most are one alone."""
        return (self,)

    async def share_weights(self, host: str | None = None) -> WeightUpdate:
        """The weights that it serves, for a peer whose publisher has them no more. Raises EngineError if it cannot.

        ``host``: the address of the engine's machine, where the peer may be on another one.
        """
        raise EngineError(f"engine {type(self).__name__}: it cannot share its weights; publish them again")

    def enter(self, pool: Pool) -> None:
        """Someone who may submit requests is at work: a deterministic engine waits for it before it decodes.

        May be called at any time; who has entered is remembered through a restart.
        """

    def leave(self, pool: Pool) -> None:
        """The counterpart of ``enter``."""

    async def settled(self) -> None:
        """Return when what was said before (requests, ``enter``, ``leave``) has reached the engine, wherever it is."""

    async def start(self) -> None:
        """Serve. One that died serves again, with its first weights: ``load_weights`` follows."""

    async def stop(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...

    async def died(self) -> str:
        """Return when a started engine has died, and why; never, if only its calls can tell."""
        await asyncio.Event().wait()
        return ""

    @abstractmethod
    async def health(self) -> Mapping[str, float]:
        """Gauges such as running and waiting requests; raises EngineError when the engine is dead."""
