"""The engine ``sglang``: the core's interface over the HTTP API of a server.

Every request is salted by the policy version under which it is submitted, so the server's prefix cache never gives one
version's keys and values to another, and need not be flushed. (A flush with anything in flight ends the server.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.chat_state import advanced
from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.types import Encoded, Stop, Version
from relax_core.weight_receiver import Receiver
from relax_plugin_sglang.client import ServerUnreachable
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.gauges import gauges
from relax_plugin_sglang.life import Life
from relax_plugin_sglang.wire import Answer

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.config.schema import RunConfig
    from relax_core.setup import EngineSetup
    from relax_core.weights import WeightUpdate

_FIRST = Version(0, 0)
_ATTEMPTS = 2
"""Of a request whose connection broke while the server lives."""


class SglangEngine(Engine):
    """Samples with an SGLang server, a child process or one elsewhere.

    A token's version is a lower bound: the one under which its request was submitted. ``setup.deterministic`` asks for
    batches that do not depend on timing, which no server of this kind has; see the setting ``deterministic`` for draws
    that do not. ``sampling.max_new_tokens`` limits a whole turn: a continued prefix (``request.drawn``) counts.
    """

    Config = SglangConfig
    config: SglangConfig
    exact_versions = False

    def __init__(self, config: SglangConfig, setup: EngineSetup) -> None:
        super().__init__(config)
        self.setup = setup
        self.version = _FIRST
        self._life: Life | None = None
        self._receiver = Receiver()
        self._hollow = False
        """Whether the server's weights were given up, to be sent again."""
        self._requests = self._tokens = 0

    @classmethod
    def check(cls, config: SglangConfig, run: RunConfig) -> Iterable[str]:
        """Settings that cannot work together with the rest of the run file."""
        placement = getattr(run.runtime, "placement", None)
        if placement == "colocate" and config.device != "cpu" and config.python and not config.memory_saver:
            yield (
                "memory_saver: false, but runtime.placement is colocate: the sleeping server would keep the GPU's "
                "memory from the trainer; set it to true"
            )

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a server with the model's initial weights. Raises EngineError, with its last words, if it does not, and
        for a model whose media no server reads."""
        await self.stop()
        self.version, self._hollow = _FIRST, False
        self._life = life = await Life.begin(self.config, self.setup)
        self._receiver = Receiver(group=True, device=life.sender.device)

    async def stop(self) -> None:
        """End it; requests get an EngineError."""
        life, self._life = self._life, None
        if life is not None:
            await life.end("it was stopped")
            async with life.loading:
                self._receiver.close()

    def alive(self) -> Life:
        """The server that it has now. Raises EngineError without one that can serve."""
        if self._life is None:
            raise EngineError("engine sglang: it cannot serve: it was not started, or was stopped; start it")
        return self._life.alive()

    async def died(self) -> str:
        """Return why, once a started server has ended or does not answer."""
        life = self._life
        if life is None:
            return "it was not started"
        return await asyncio.shield(life.ended)

    async def health(self) -> Mapping[str, float]:
        """Requests with the server and waiting here, the policy version, what was served; the server's own metrics."""
        life = self.alive()
        own = {
            "running": float(life.gate.inside),
            "waiting": float(life.gate.waiting),
            "version": float(self.version.number),
            "requests": float(self._requests),
            "drawn_tokens": float(self._tokens),
        }
        try:
            theirs = gauges(await life.client.text("/metrics")) if self.config.metrics else {}
            if not self.config.metrics:
                await life.client.get("/model_info")
        except ServerUnreachable as error:
            await life.lost(error)
            theirs = {}
        return own | {f"server/{name}": value for name, value in theirs.items()}

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """Sample one turn. Raises EngineError for what the server refuses, and when it is gone."""
        done = _Drawn()
        while True:
            life = self.alive()
            await life.gate.enter(request.order)
            try:
                version, aborts = self.version, life.aborts
                answer = await self._ask(life, done.left(request), version)
            finally:
                life.gate.leave()
            done.add(answer, version)
            if answer.stop is Stop.ABORT and life.aborts == aborts:
                raise EngineError(
                    f"engine sglang: the server ended {request.id} after {len(done.ids)} tokens by itself"
                )
            if answer.stop is not None:
                break
        self._requests += 1
        self._tokens += len(done.ids)
        return done.completion(answer)

    async def _ask(self, life: Life, request: Request, version: Version) -> Answer:
        for attempt in range(_ATTEMPTS):
            rid, aborts = life.rid(), life.aborts
            try:
                found = await life.client.generate(life.wire.body(request, rid, life.salt(version)))
                return life.wire.answer(found, len(request.prompt.ids))
            except asyncio.CancelledError:
                life.forget(rid)
                raise
            except ServerUnreachable as error:
                await life.lost(error)
                if attempt + 1 == _ATTEMPTS:
                    raise
                life.forget(rid)
            except EngineError:
                if life.aborts == aborts:
                    raise
                break  # some versions refuse what they abort before its first token
        return Answer([], [], Stop.ABORT)

    # --- weights and memory ------------------------------------------------------------------------------------------

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        """See ``Engine``. Everything is received and verified here before anything running is touched.

        What goes wrong after that leaves the server with a mixture of weights: then it is dead.
        """
        life = self.alive()
        async with life.loading:
            if interrupt == "drain":
                life.gate.shut("weights")
            try:
                named = await self._receive(update)
                life.sender.check(named)
                life.gate.shut("weights")  # who comes from now on is of the new version
                await self._interrupt(life, interrupt)
                await self._send(life.alive(), update, named)
            finally:
                await life.thaw("weights")
                life.gate.open("weights")
                if self._life is not life:
                    self._receiver.close()

    async def _receive(self, update: WeightUpdate) -> list[tuple[str, Tensor]]:
        """In a thread, while the server goes on."""
        work = asyncio.create_task(asyncio.to_thread(self._receiver.receive, update))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)  # it writes into the memory that the next one uses
            raise

    async def _interrupt(self, life: Life, interrupt: Interrupt) -> None:
        if interrupt == "drain":
            await life.gate.empty()
        elif interrupt == "abort":
            await life.abort_all()
        elif life.gate.inside:
            await life.freeze("weights", self.config.interrupt)

    async def _send(self, life: Life, update: WeightUpdate, named: list[tuple[str, Tensor]]) -> None:
        version = update.manifest.version
        try:
            await life.sender.send(named, f"{version.lineage}.{version.number}")
        except BaseException as error:
            life.die(f"its weights are a mixture: version {version.number} was not taken over whole: {error}")
            raise
        self.version = version
        self._receiver.took(update, adopted=False)
        if self._hollow:
            self._hollow = False
            life.gate.open("asleep")

    async def pause(self) -> None:
        """No token until ``resume``; requests may still come."""
        life = self.alive()
        life.gate.shut("paused")
        await life.freeze("paused", "in_place")

    async def resume(self) -> None:
        life = self.alive()
        await life.thaw("paused")
        life.gate.open("paused")

    async def sleep(self) -> None:
        """Free the accelerator: running requests come back with Stop.ABORT, caches and weights go.

        Waiting requests, and new ones, wait until weights are loaded after ``wake``. Without ``memory_saver`` the
        weights stay where they are.
        """
        life = self.alive()
        life.gate.shut("asleep")
        await life.abort_all()
        if self.config.memory_saver:
            await life.idle()
            self._hollow = True
            await life.client.post("/release_memory_occupation", {})

    async def wake(self) -> None:
        """Back to the device; then ``load_weights``, of all weights."""
        life = self.alive()
        if self._hollow:
            self._receiver.close()
            await life.client.post("/resume_memory_occupation", {})
        else:
            life.gate.open("asleep")


class _Drawn:
    """What the requests for one turn have brought so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[Version] = []

    def left(self, request: Request) -> Request:
        if not self.ids:
            return request
        prompt = request.prompt
        ids = Encoded([*prompt.ids, *self.ids], prompt.media, advanced(prompt.positions, len(self.ids)))
        return replace(request, prompt=ids, drawn=request.drawn + len(self.ids))

    def add(self, answer: Answer, version: Version) -> None:
        self.ids += answer.ids
        self._logprobs += answer.logprobs
        self._versions += [version] * len(answer.ids)

    def completion(self, last: Answer) -> Completion:
        assert last.stop is not None
        extras: dict[str, Any] = {} if last.experts is None else {"routed_experts": last.experts}
        return Completion(self.ids, self._logprobs, self._versions, last.stop, extras)
