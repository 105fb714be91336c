"""One rank of a trainer, of policy or critic, as an actor."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from relax_core.config.schema import ComponentSection
from relax_core.errors import RelaxError
from relax_core.interfaces import Columns
from relax_core.run import build_algorithm
from relax_core.runtime import published
from relax_core.setup import TrainerSetup
from relax_plugin_ray.rows import Intake, PeerFeed, opened
from relax_plugin_ray.worker import adapter_of, imported, keep_to, node_address, run_of

if TYPE_CHECKING:
    from relax_core.interfaces import StepResult, Trainer
    from relax_core.torch.layout import Kind
    from relax_core.torch.ranks import Ranks
    from relax_core.types import LearnerName, Version
    from relax_core.weights import WeightUpdate
    from relax_plugin_ray.bus_table import Table
    from relax_plugin_ray.media import SharedMedia

CALLBACKS = "callbacks.json"
"""In the trainer's folder of a checkpoint: the state of the callbacks that live on its ranks, from rank 0."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the controller must know of the trainer. ``kind`` None: it must be asked for every cost."""

    kind: Kind | None
    budget: int
    frozen: frozenset[str]


class _Ranked(Protocol):
    """A trainer of several ranks."""

    team: Any

    async def follow(self, algorithm: Any) -> None: ...


@dataclass(slots=True)
class _Parts:
    trainer: Trainer
    media: SharedMedia
    run: Any
    algorithm: Any
    transport: Any
    feed: PeerFeed
    steps: dict[int, Intake] = field(default_factory=dict)


class RankActor:
    """To be made with ``ray.remote``, never restarted: ranks begin and end together.

    Rank 0 is the trainer that the controller knows. The others follow it, in a thread of their own, so that they can
    be sent rows meanwhile. ``transport``: how weights are published if the run file does not say; a critic's are not.
    """

    def __init__(
        self,
        resolved: Mapping[str, Any],
        role: str,
        rank: int,
        size: int,
        transport: str = "shared",
        learner: LearnerName = "policy",
        cores: tuple[int, ...] = (),
    ) -> None:
        self._resolved, self._role, self._rank, self._size = resolved, role, rank, size
        self._transport, self._learner, self._cores = transport, learner, cores
        self._thread = ThreadPoolExecutor(1, "follow") if rank else None
        self._parts: _Parts | None = None

    def __repr__(self) -> str:
        return self._role

    @property
    def _built(self) -> _Parts:
        if self._parts is None:
            raise RelaxError(f"{self._role}: it was asked to work before it was ready")
        return self._parts

    # --- beginning and end --------------------------------------------------------------------------------------------

    async def address(self) -> str:
        """A free place on this machine where ranks can meet."""
        host = node_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    async def ready(self, address: str, peers: Sequence[Any], patience_s: float) -> Facts:
        """Meet the other ranks and build the trainer; all ranks at the same time.

        ``peers``: the actors by rank. ``patience_s``: how long one rank waits for another.
        """
        await self._beside(lambda: self._build(address, peers, patience_s))
        trainer = self._built.trainer
        kind = getattr(getattr(trainer, "compute", None), "kind", None)
        return Facts(kind, trainer.budget, trainer.frozen_names())

    async def _beside(self, work: Callable[[], None]) -> None:
        """In the thread in which this rank computes."""
        if self._thread is None:
            work()
        else:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _build(self, address: str, peers: Sequence[Any], patience_s: float) -> None:
        keep_to(self._cores, self._role)
        run = run_of(self._resolved, self._role)
        imported(run, "trainers", run.config.trainer)
        adapter, media = adapter_of(run)
        stack, config = run.stack, run.config
        algorithm = build_algorithm(run)
        ranks = self._joined(stack.config("trainers", config.trainer, "trainer"), address, patience_s)
        setup = TrainerSetup(adapter, run, algorithm.outputs, ranks, self._learner)
        trainer: Trainer = stack.build("trainers", config.trainer, setup, where="trainer")
        feed = PeerFeed(media, peers, patience_s)
        if self._size > 1:
            cast(_Ranked, trainer).team.feed = feed
        section = config.transport or ComponentSection(id=self._transport)
        publishes = self._rank == 0 and self._learner == "policy"
        transport = None if not publishes else stack.build("transports", section, where="transport")
        self._parts = _Parts(trainer, media, run, algorithm, transport, feed)

    def _joined(self, settings: Any, address: str, patience_s: float) -> Ranks | None:
        if self._size == 1:
            return None
        import torch

        from relax_core.torch.ranks import join

        device = getattr(settings, "device", "auto")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return join(self._rank, self._size, address, device, patience_s)

    async def live(self) -> None:
        """Never returns while the rank is well. Ranks other than rank 0 work in this call."""
        if self._thread is None:
            await asyncio.Event().wait()
            return
        parts = self._built
        trainer = cast(_Ranked, parts.trainer)
        await self._beside(lambda: asyncio.run(trainer.follow(parts.algorithm)))

    async def close(self) -> None:
        """Free what was published."""
        if self._parts is not None and self._parts.transport is not None:
            self._parts.transport.close()

    # --- work ---------------------------------------------------------------------------------------------------------

    def _intake(self, ticket: int) -> Intake:
        parts = self._built
        return parts.steps.setdefault(ticket, Intake(parts.media))

    async def step(self, ticket: int, step: int) -> StepResult:
        """A training step whose plan comes by ``cut``."""
        parts, intake = self._built, self._intake(ticket)
        plan = intake.plan()
        try:
            return await parts.trainer.step(step, plan, parts.algorithm)
        finally:
            intake.close("the step has ended")
            await plan.aclose()
            for old in [t for t in parts.steps if t < ticket]:
                del parts.steps[old]

    async def cut(self, ticket: int, number: int, table: Table | None, last: bool) -> None:
        """Of a step's plan; returns when it is trained. ``table`` None: the plan's end."""
        await self._intake(ticket).put(number, table, last)

    async def abandon(self, ticket: int, why: str) -> None:
        """The plan broke off."""
        self._intake(ticket).close(why)

    async def forward(self, table: Table, outputs: frozenset[str]) -> list[Columns]:
        parts = self._built
        with opened(table, parts.media) as rows:
            return await parts.trainer.forward(rows, outputs)

    async def take(self, ticket: int, table: Table) -> None:
        """From rank 0: rows for this rank to compute."""
        self._built.feed.take(ticket, table)

    async def cost(self, table: Table) -> int:
        with opened(table, self._built.media) as rows:
            return self._built.trainer.cost(rows)

    async def publish(self, version: Version, blank: bool) -> WeightUpdate:
        """On rank 0: copy the weights (``blank``: zeros) to where receivers can read them, as this version."""
        parts = self._built
        return published(parts.transport, parts.trainer, version, blank)

    async def weights(self) -> list[tuple[str, Any]]:
        """Copies in main memory."""
        return [(name, tensor.detach().cpu().clone()) for name, tensor in self._built.trainer.weights()]

    # --- checkpoints and memory ---------------------------------------------------------------------------------------

    async def save(self, folder: Path) -> None:
        """On rank 0, which also writes the state of its callbacks."""
        parts = self._built
        parts.trainer.save(folder)
        states = {name: callback.state_dict() for name, callback in parts.run.stack.callbacks.items()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CALLBACKS).write_text(json.dumps(states))

    async def load(self, folder: Path) -> None:
        """On rank 0."""
        self._built.trainer.load(folder)

    async def load_callbacks(self, folder: Path) -> None:
        """On every rank: what rank 0's callbacks were."""
        file = folder / CALLBACKS
        states = json.loads(file.read_text()) if file.exists() else {}
        for name, callback in self._built.run.stack.callbacks.items():
            callback.load_state_dict(states.get(name, {}))

    async def sleep(self) -> None:
        await self._built.trainer.sleep()

    async def wake(self) -> None:
        await self._built.trainer.wake()

    async def counters(self) -> dict[str, int]:
        """Of this rank: its process, how often it slept and woke, and the bytes on its device by what they are."""
        trainer: Any = self._built.trainer
        found = {"pid": os.getpid(), **{name: int(getattr(trainer, name, 0)) for name in ("sleeps", "wakes")}}
        return found | (dict(trainer.memory()) if hasattr(trainer, "memory") else {})
