"""Several engines as one: spreads requests over replicas, and brings back those that die.

A request that a dying replica loses is sent to another one. Draws depend on the request's key alone, so what is sampled
again is the same. Only the running loop's time is read, so all of this runs under a virtual clock too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from relax_core.errors import EngineError, WeightsError
from relax_core.interfaces import Completion, Engine, Interrupt, Pool, Request
from relax_core.loads import Homes, Loads, cost
from relax_core.replica import Replica, Restarts, State
from relax_core.supply import Supply

if TYPE_CHECKING:
    from relax_core.weights import WeightUpdate


class Router(Engine):
    """Each request goes to the replica with the least outstanding tokens (prompt and new ones, not yet drawn), a
    conversation's next turn to the one that served it before, for its prefix cache.

    A replica is dead when a call raises EngineError and its ``health`` does too; a request that a living one refuses
    is the caller's. A dead one is started again (``Engine.start`` restarts), at once and then after growing delays, and
    gets the newest weights before it serves: from their publisher, or else from a living replica. More than
    ``max_restarts`` within ``within_s`` seconds, and it stays out. While none serves, requests wait; EngineError only
    when none is left.

    Engines that decode only when every entered party waits (deterministic ones) can serve alone, not beside others.
    ``note`` is told what happens to replicas; ``remembered`` bounds the conversations whose replica is known.
    """

    def __init__(
        self,
        replicas: Sequence[Engine],
        note: Callable[[str], None] = print,
        *,
        max_restarts: int = 5,
        within_s: float = 600.0,
        delay_s: float = 0.5,
        remembered: int = 1 << 16,
    ) -> None:
        super().__init__(None)
        if not replicas:
            raise EngineError("engines: no replica is given; at least one is needed")
        self._replicas = [
            Replica(i, engine, Restarts(max_restarts, within_s, delay_s)) for i, engine in enumerate(replicas)
        ]
        self._note = note
        self._loads, self._homes = Loads(len(replicas)), Homes(remembered)
        self._update: WeightUpdate | None = None
        self.supply = Supply()
        self._paused = self._asleep = False
        self._stopped = True
        self._available = asyncio.Event()
        self._waiting = self.resent = self.restarts = 0
        """Requests for which no replica serves now; requests that were sent again, and restarts, since the start."""

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas at once. Raises what the first one raised that cannot start; then all are stopped."""
        self._stopped, self._available = False, asyncio.Event()
        self._update, self._paused, self._asleep = None, False, False
        self.resent = self.restarts = 0
        results = await asyncio.gather(*(r.engine.start() for r in self._replicas), return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            await self.stop()
            raise errors[0]
        for replica in self._replicas:
            replica.restarts.clear()
            self._serve(replica)

    async def stop(self) -> None:
        self._stopped = True
        tasks = [task for replica in self._replicas for task in replica.cancel()]
        for replica in self._replicas:
            replica.state, replica.reason = State.OUT, "it was stopped"
            replica.incarnation += 1
            self._loads.leave(replica.index)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._available.set()
        await asyncio.gather(*(r.engine.stop() for r in self._replicas))

    def _serve(self, replica: Replica) -> None:
        replica.state = State.SERVING
        self._loads.join(replica.index)
        self.exact_versions = all(r.engine.exact_versions for r in self._replicas if r.state is not State.OUT)
        self._available.set()
        replica.watching = asyncio.create_task(self._watch(replica), name=f"watch engine {replica.index}")

    async def _watch(self, replica: Replica) -> None:
        """Requests may come to it from elsewhere: its death must not wait to be found by one of ours."""
        incarnation, reason = replica.incarnation, await replica.engine.died()
        if replica.incarnation == incarnation:
            self._take_out(replica, reason)

    async def _found_dead(self, replica: Replica, incarnation: int) -> bool:
        """Whether a call of that incarnation failed because it is dead; then it is out of service now."""
        if replica.incarnation == incarnation:
            try:
                await replica.engine.health()
            except EngineError as error:
                if replica.incarnation == incarnation:
                    self._take_out(replica, str(error))
        return replica.incarnation != incarnation

    def _take_out(self, replica: Replica, reason: str) -> None:
        replica.state, replica.reason = State.RESTARTING, reason
        replica.incarnation += 1
        self.supply.lost(replica.name)
        self._loads.leave(replica.index)
        if replica.watching is not None and replica.watching is not asyncio.current_task():
            replica.watching.cancel()
        if not self._serving():
            self._available.clear()
        lost = self._loads.requests[replica.index]
        self._note(f"engine {replica.index}: {reason}; it is started again, its {lost} requests go elsewhere")
        replica.reviving = asyncio.create_task(self._revive(replica), name=f"restart engine {replica.index}")

    async def _revive(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (delay := replica.restarts.delay(loop.time())) is not None:
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                await replica.engine.start()
                await self._prepare(replica)
            except Exception as error:  # whatever a start raises: the others serve on
                replica.reason = f"{type(error).__name__}: {error}"
                self._note(f"engine {replica.index}: its restart failed: {replica.reason}")
            else:
                self._serve(replica)
                self._note(f"engine {replica.index}: serves again after {loop.time() - began:.1f} s")
                return
        replica.state = State.OUT
        self._note(f"engine {replica.index}: stays out: {replica.restarts}")
        if not self._left():
            self._available.set()
        with suppress(Exception):
            await replica.engine.stop()

    async def _prepare(self, replica: Replica) -> None:
        """Bring a started replica to where the others are, whatever is asked of them meanwhile."""
        engine = replica.engine
        loaded: WeightUpdate | None = None
        paused = asleep = False
        while True:
            if self._update is not None and loaded is not self._update:
                loaded = await self._give(replica, self._update)
            elif paused != self._paused:
                paused = self._paused
                await (engine.pause() if paused else engine.resume())
            elif asleep != self._asleep:
                asleep = self._asleep
                await (engine.sleep() if asleep else engine.wake())
            else:
                return

    async def _give(self, replica: Replica, update: WeightUpdate) -> WeightUpdate:
        peers = {r.name: r.engine for r in self._serving()}
        await self.supply.give_newest(replica.name, replica.engine, update, peers)
        return update

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """Sample one turn on some replica, as often as replicas die meanwhile."""
        tokens = cost(request)
        while True:
            replica = self._choose(request)
            if replica is None:
                replica = await self._first_free(request)
            incarnation = replica.incarnation
            self._loads.begin(replica.index, tokens)
            try:
                return await replica.engine.generate(request)
            except EngineError:
                if self._stopped or not await self._found_dead(replica, incarnation):
                    raise
            finally:
                self._loads.end(replica.index, tokens)
            self.resent += 1

    def _choose(self, request: Request) -> Replica | None:
        conversation = (request.key[:3], request.pool)
        home = self._homes.get(conversation)
        if home is not None:
            replica = self._replicas[home[0]]
            if replica.state is State.SERVING and replica.incarnation == home[1]:
                self._homes.set(conversation, *home)
                return replica
        index = self._loads.least()
        if index is None:
            return None
        replica = self._replicas[index]
        self._homes.set(conversation, index, replica.incarnation)
        return replica

    async def _first_free(self, request: Request) -> Replica:
        """Wait until a replica serves. Raises EngineError when none is left."""
        self._waiting += 1
        try:
            while (replica := self._choose(request)) is None:
                self._check_left()
                await self._available.wait()
            return replica
        finally:
            self._waiting -= 1

    def _serving(self) -> list[Replica]:
        return [r for r in self._replicas if r.state is State.SERVING]

    def _left(self) -> list[Replica]:
        return [r for r in self._replicas if r.state is not State.OUT]

    def _check_left(self) -> None:
        if not self._left():
            reasons = "; ".join(f"engine {r.index}: {r.reason}" for r in self._replicas)
            raise EngineError(f"engines: none of {len(self._replicas)} is left; start them again: {reasons}")

    def replicas(self) -> Sequence[Engine]:
        return [replica.engine for replica in self._replicas]

    # --- all of them -------------------------------------------------------------------------------------------------

    def enter(self, pool: Pool) -> None:
        self._of_one("enter", pool)

    def leave(self, pool: Pool) -> None:
        self._of_one("leave", pool)

    def _of_one(self, method: str, pool: Pool) -> None:
        """Only an engine alone may wait for parties, so several are not told; a dead one keeps them for its restart."""
        if len(self._replicas) == 1:
            getattr(self._replicas[0].engine, method)(pool)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        """To all replicas at once; one that is being started gets them before it serves. Waits until one has them.

        Raises WeightsError when a replica refuses them, EngineError when none is left.
        """
        before, self._update = self._update, update
        try:
            await self._settle()
            await self._on_all(lambda r: self.supply.give(r.name, r.engine, update, interrupt))
            await self._settle()
        except WeightsError:
            self._update = before
            raise

    async def _settle(self) -> None:
        """Until a replica serves. Raises EngineError when none is left."""
        self._check_left()
        while not self._serving():
            await self._available.wait()
            self._check_left()

    async def _on_all(self, call: Callable[[Replica], Awaitable[Any]]) -> dict[int, Any]:
        """What each serving replica answers, by its place; one that dies meanwhile is taken out and left out."""

        async def ask(replica: Replica) -> None:
            incarnation = replica.incarnation
            try:
                found[replica.index] = await call(replica)
            except EngineError:
                if self._stopped or not await self._found_dead(replica, incarnation):
                    raise
            except WeightsError as error:
                raise WeightsError(f"engine {replica.index}: {error}") from error

        found: dict[int, Any] = {}
        results = await asyncio.gather(*map(ask, self._serving()), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error
        return found

    async def settled(self) -> None:
        await self._on_all(lambda r: r.engine.settled())

    async def share_weights(self, host: str | None = None) -> WeightUpdate:
        """Those of the first replica that can."""
        await self._settle()
        for replica in self._serving():
            with suppress(EngineError):
                return await replica.engine.share_weights(host)
        raise EngineError("engines: no replica can share its weights; publish them again")

    async def pause(self) -> None:
        self._paused = True
        await self._on_all(lambda r: r.engine.pause())

    async def resume(self) -> None:
        self._paused = False
        await self._on_all(lambda r: r.engine.resume())

    async def sleep(self) -> None:
        self._asleep = True
        await self._on_all(lambda r: r.engine.sleep())

    async def wake(self) -> None:
        self._asleep = False
        await self._on_all(lambda r: r.engine.wake())

    async def health(self) -> Mapping[str, float]:
        """Sums over the serving replicas (of ``version`` the least), the router's own, and each replica's gauges as
        ``replicas/PLACE/NAME``. Raises EngineError only when no replica is left."""
        found = await self._on_all(lambda r: r.engine.health())
        self._check_left()
        gauges: Counter[str] = Counter()
        each: dict[str, float] = {}
        for index, values in found.items():
            gauges.update(values)
            each |= {f"replicas/{index}/{name}": value for name, value in values.items()}
        if versions := [values["version"] for values in found.values() if "version" in values]:
            gauges["version"] = min(versions)
        for replica, tokens in zip(self._replicas, self._loads.tokens, strict=True):
            each[f"replicas/{replica.index}/outstanding_tokens"] = float(tokens)
            each[f"replicas/{replica.index}/serving"] = float(replica.state is State.SERVING)
        return {
            **gauges,
            "waiting": float(gauges["waiting"] + self._waiting),
            "outstanding_tokens": float(sum(self._loads.tokens)),
            "replicas": float(len(self._replicas)),
            "serving": float(len(found)),
            "restarts": float(self.restarts),
            "resent": float(self.resent),
            **each,
        }
