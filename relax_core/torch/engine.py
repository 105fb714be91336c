"""The embedded engine: the decoder behind ``Engine``'s interface, run by one asyncio task, a step at a time.

Everything happens on the event loop's thread, so weights, aborts and pauses always fall between two decode steps. New
weights alone are received and verified in another thread, while decoding goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from relax_core.errors import EngineError
from relax_core.interfaces import POOLS, Completion, Engine, Interrupt, Pool, Request
from relax_core.setup import EngineSetup
from relax_core.torch.config import EngineConfig
from relax_core.torch.decoder import Decoder, Ended
from relax_core.torch.optim import named_tensors
from relax_core.torch.swap import Named, check_weights
from relax_core.weight_receiver import Receiver

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Transport
    from relax_core.weights import WeightUpdate

_MAX_FAILURES = 3
"""Failures of the model in a row after which the engine calls itself dead."""


class TorchEngine(Engine):
    """Samples with the transformers model itself, in the process that holds this object.

    Deterministic mode: a pool decodes only while every entered party of it waits in ``generate``; a party counts as at
    work again from the moment at which its result is set. Enter a new party only while another one is at work (or
    before the first request): then what is decoded together depends on nothing but the requests.

    ``sampling.max_new_tokens`` limits a whole turn: a continued prefix (``request.drawn``) counts.
    """

    Config = EngineConfig
    exact_versions = True

    def __init__(self, config: EngineConfig, setup: EngineSetup) -> None:
        super().__init__(config)
        self.setup = setup
        self.decoder: Decoder | None = None
        self._futures: dict[int, tuple[Pool, asyncio.Future[Completion]]] = {}
        self._pending: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        self._entered: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        self._paused = self._asleep = False
        self._make_events()
        self._receiver = Receiver()
        self._sharing: Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_pool: Pool = POOLS[-1]
        self._dead: str | None = "it was not started"
        self._cause: BaseException | None = None

    def _make_events(self) -> None:
        """Anew at every start: they belong to one event loop. ``_idle`` is set whenever no row is running."""
        self._wake, self._idle, self._loading = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._idle.set()

    @classmethod
    def check(cls, config: EngineConfig, run: RunConfig) -> Iterable[str]:
        """Settings under which no training request could ever be served."""
        new, room = run.sampling.max_new_tokens, config.max_cache_tokens
        if room is not None and room <= new:
            yield f"max_cache_tokens: {room}; needs more than sampling.max_new_tokens ({new}) and a prompt: raise it"

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the engine's own copy of the model and begin to serve. Raises EngineError without the asked-for GPU."""
        await self.stop()
        config: EngineConfig = self.config
        device = _device(config.device)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.dtype)
        threads = config.threads or (1 if device == "cpu" else None)
        if threads is not None:
            torch.set_num_threads(threads)
        adapter = self.setup.adapter
        model = adapter.load(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))
        model.eval().requires_grad_(False)
        self.decoder = Decoder(
            adapter, model, self.setup.seed, config.max_rows, config.max_prefill_tokens, config.max_cache_tokens
        )
        self._paused = self._asleep = False
        self._dead = self._cause = None
        self._receiver = Receiver(group=True, device=str(self.decoder.device))
        self._make_events()
        self._task = asyncio.create_task(self._serve(), name="torch engine")

    async def stop(self) -> None:
        """End it and free the model; requests that wait get an EngineError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = self.decoder = None
        self._die("it was stopped")
        self._stop_sharing()
        if not self._loading.locked():  # else who loads closes it
            self._receiver.close()

    def _die(self, reason: str, cause: BaseException | None = None) -> None:
        if self._dead is None:
            self._dead, self._cause = reason, cause
        for ticket in list(self._futures):
            self._deliver(ticket, EngineError(f"engine: request lost: {self._dead}"))
        self._idle.set()
        self._wake.set()

    def _alive(self) -> Decoder:
        if self._dead is not None or self.decoder is None:
            raise EngineError(f"engine: it cannot serve: {self._dead}; start it again") from self._cause
        return self.decoder

    async def health(self) -> Mapping[str, float]:
        """Running and waiting requests, the policy version, tokens drawn, prompts read and bytes of cache."""
        decoder = self._alive()
        return {
            "running": float(sum(map(decoder.running, POOLS))),
            "waiting": float(sum(map(decoder.waiting, POOLS))),
            "version": float(decoder.version.number),
            "drawn_tokens": float(decoder.drawn),
            "read_prompts": float(decoder.prefilled),
            "cache_bytes": float(decoder.cache_bytes),
        }

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """Sample one turn. Raises EngineError when it can never fit or be read, and when the engine is dead."""
        ticket = self._alive().submit(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[ticket] = (request.pool, future)
        self._pending[request.pool] += 1
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(ticket, None) and self.decoder is not None:
                self._pending[request.pool] -= 1
                self.decoder.cancel(ticket)
                self._mark_idle(self.decoder)
                self._wake.set()
            raise

    def enter(self, pool: Pool) -> None:
        self._entered[pool] += 1

    def leave(self, pool: Pool) -> None:
        self._entered[pool] -= 1
        self._wake.set()

    def _deliver(self, ticket: int, result: Completion | EngineError) -> None:
        pool, future = self._futures.pop(ticket)
        self._pending[pool] -= 1
        if future.done():  # cancelled, and not yet told
            return
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _deliver_all(self, ended: Ended) -> None:
        for ticket, result in ended:
            self._deliver(ticket, result)

    # --- decoding ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Decode while there is work; between two steps everybody else on the loop gets a turn."""
        try:
            while self._dead is None:
                pool = self._next_pool()
                if pool is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    self._step(pool)
                    await asyncio.sleep(0)
        except Exception as error:
            self._die(f"{type(error).__name__}: {error}", error)

    def _next_pool(self) -> Pool | None:
        """The pools take turns."""
        if self._paused or self._asleep:
            return None
        decoder = self._alive()
        turn = POOLS.index(self._last_pool) + 1
        for pool in (*POOLS[turn:], *POOLS[:turn]):
            together = not self.setup.deterministic or self._pending[pool] >= self._entered[pool]
            if together and decoder.busy(pool):
                return pool
        return None

    def _step(self, pool: Pool) -> None:
        decoder = self._alive()
        self._last_pool = pool
        ended = decoder.step(pool)
        self._deliver_all(ended)
        self._mark_idle(decoder)
        if decoder.failures >= _MAX_FAILURES:
            error = next(result for _, result in ended if isinstance(result, EngineError))
            self._die(f"the model failed {decoder.failures} times in a row, the last time: {error}", error)

    def _mark_idle(self, decoder: Decoder) -> None:
        if any(map(decoder.running, POOLS)):
            self._idle.clear()
        else:
            self._idle.set()

    # --- weights and memory ------------------------------------------------------------------------------------------

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        """See ``Engine``. Everything is verified before anything running is touched."""
        async with self._loading:
            receiver, decoder = self._receiver, self._alive()
            try:
                decoder.admitting = interrupt != "drain"
                weights, held = await self._receive(receiver, update), receiver.kept(update)
                if self._alive() is not decoder:
                    raise EngineError("engine: it was started anew while weights came; load them again")
                check_weights(decoder.model, weights, held)
                if interrupt == "drain":
                    await self._idle.wait()
                    self._alive()
                elif interrupt == "abort":
                    self._deliver_all(decoder.abort())
                self._swap(decoder, update, weights, held)
            finally:
                decoder.admitting = True
                self._wake.set()
                if self.decoder is not decoder:
                    receiver.close()

    async def _receive(self, receiver: Receiver, update: WeightUpdate) -> Named:
        """In a thread, while decoding goes on; but where batches must not depend on timing nothing is decoded."""
        if self.setup.deterministic:
            return receiver.receive(update)
        work = asyncio.create_task(asyncio.to_thread(receiver.receive, update))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)  # it writes into the memory that the next one uses
            raise

    def _swap(self, decoder: Decoder, update: WeightUpdate, weights: Named, held: frozenset[str]) -> None:
        """Between two steps: the model draws from the received tensors themselves from now on."""
        decoder.swap(update.manifest.version, weights, held)
        self._receiver.took(update, adopted=True)
        self._mark_idle(decoder)
        self._stop_sharing()

    async def share_weights(self, host: str | None = None) -> WeightUpdate:
        """What this engine serves, for a peer that lacks it: in shared memory or, with this machine's address, by TCP.

        It is readable until new weights are loaded here, or the engine stops.
        """
        async with self._loading:
            decoder = self._alive()
            self._stop_sharing()
            self._sharing = sharing = _sharing(host)
            weights, frozen = list(named_tensors(decoder.model)), self._receiver.frozen
            return await asyncio.to_thread(sharing.publish, decoder.version, weights, frozen)

    def _stop_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None

    async def pause(self) -> None:
        """No step until ``resume``; requests may still come."""
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    async def sleep(self) -> None:
        """Free the accelerator: running requests come back with Stop.ABORT, caches go, weights move to main memory.

        Waiting requests, and new ones, wait for ``wake``. On a CPU the weights stay where they are.
        """
        decoder = self._alive()
        self._asleep = True
        self._deliver_all(decoder.abort())
        self._mark_idle(decoder)
        decoder.leave()

    async def wake(self) -> None:
        """Back to the device; then ``load_weights`` as ever."""
        self._alive().enter(_device(self.config.device))
        self._asleep = False
        self._wake.set()


def _sharing(host: str | None) -> Transport:
    from relax_core.transports import SharedTransport, TcpTransport

    return SharedTransport(SharedTransport.Config()) if host is None else TcpTransport(TcpTransport.Config(host=host))


def _device(name: str) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= gpus:
        found = f"{gpus} GPUs" if gpus else "no GPU"
        raise EngineError(f"engine.device: {name!r}, but torch sees {found} here; use 'cpu' or 'auto'")
    return ("cuda" if gpus else "cpu") if name == "auto" else name
