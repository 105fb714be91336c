"""The bus's contract, last part: a whole run in small, with seeded interleavings, deaths and cancellations.

A rollout, three kinds of stages and a trainer work on one small bus, under admission. Holders die while they work, also
without noticing it; plays fail, groups are filtered, claims are cancelled. Whatever happens, every group contributes
exactly once or ends otherwise, every trained row has its columns, order and lag hold, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from relax_core.admission import Admission, Outcome, Ticket
from relax_core.bus import Bus, By, Claim, Holder, merge
from relax_core.errors import FencedError
from relax_core.testing.bus_kit import Check, Kit

STEPS, GROUPS_PER_STEP, STALENESS, MAX_ROWS = 12, 3, 2, 20
STAGES: dict[str, tuple[By, int, frozenset[str]]] = {
    "score": ("group", 1, frozenset({"tokens"})),
    "ref": ("row", 3, frozenset({"tokens"})),
    "value": ("group", 2, frozenset({"reward", "ref"})),
}
WORKERS = {"score-0": "score", "score-1": "score", "ref-0": "ref", "ref-1": "ref", "value-0": "value"}
COLUMN = {"score": "reward", "ref": "ref", "value": "value"}


def stress(seed: int) -> Check:
    """The check for one seed."""

    async def check_under_stress(kit: Kit) -> None:
        await _Run(kit.bus(MAX_ROWS), random.Random(seed)).run()

    return check_under_stress


class _Run:
    def __init__(self, bus: Bus, rng: random.Random) -> None:
        self.bus, self.rng = bus, rng
        self.admission = Admission(GROUPS_PER_STEP, STALENESS, max_replays=2)
        self.version = 0
        self.rollout = bus.register("rollout")
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.zombies: list[asyncio.Task[None]] = []
        self.trained: list[str] = []
        self.kills = 0
        self.fenced = 0

    async def run(self) -> None:
        self.tasks["rollout"] = asyncio.ensure_future(self.play_all())
        self.tasks["killer"] = asyncio.ensure_future(self.kill())
        for worker in WORKERS:
            self.employ(worker)
        await self.train()
        tasks = [*self.tasks.values(), *self.zombies]
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert error is None or isinstance(error, asyncio.CancelledError), repr(error)
        assert len(self.trained) == len(set(self.trained)) == STEPS * GROUPS_PER_STEP
        assert self.kills > 5 and self.fenced > 0, "the seed tries nothing"
        for ticket in self.admission.in_flight():
            await self.bus.evict(ticket.group)
        self.bus.release(STEPS)
        assert (self.bus.groups, self.bus.rows, self.bus.bytes) == (0, 0, 0)

    async def pause(self) -> None:
        for _ in range(self.rng.choice((0, 1, 1, 2, 5, 20))):
            await asyncio.sleep(0)

    # --- rollout

    async def play_all(self) -> None:
        while True:
            await self.admission.wait_open()
            while self.admission.open():
                await self.start(self.admission.start(f"task/{self.admission.next_position}@0"))
            await self.pause()

    async def start(self, ticket: Ticket) -> None:
        await self.bus.open_group(ticket.group, ticket.serial, None, self.rollout)
        self.tasks[f"play {ticket.group}"] = asyncio.ensure_future(self.play(ticket.group, self.rollout, self.version))

    async def play(self, group: str, holder: Holder, version: int) -> None:
        """Puts up to 4 rows, some at once; one group in ten fails, and those without rows."""
        with suppress(FencedError):
            count = 0
            for _ in range(self.rng.choice((0, 1, 1, 1, 2, 2, 2))):
                await self.pause()
                new = range(count, count + self.rng.choice((1, 2)))
                rows = {f"{group}/{m}/0": {"tokens": f"{group} {m}", "version": version} for m in new}
                if await self.bus.put(rows, holder, group):
                    count = new.stop
            await self.pause()
            if self.rng.random() < 0.1 or count == 0:
                await self.end(group, Outcome.FAILED)
            else:
                await self.bus.close_group(group, count, holder)
            self.tasks.pop(f"play {group}", None)
            return
        self.fenced += 1

    async def end(self, group: str, outcome: Outcome) -> None:
        """A group ends untrained, once: who learns that it has left already leaves it at that."""
        if self.bus.holds(group):
            await self.bus.evict(group)
            self.admission.end(group, outcome)
            self.admission.identity()

    # --- stages

    def employ(self, worker: str) -> None:
        self.tasks[worker] = asyncio.ensure_future(self.serve(WORKERS[worker], self.bus.register(worker)))

    async def serve(self, stage: str, holder: Holder) -> None:
        by, count, needs = STAGES[stage]
        with suppress(FencedError):
            while True:
                claim = await self.bus.claim(stage, needs, count, by, holder)
                await self.pause()
                await self.work(claim)
                await self.pause()  # many die here: the columns are there, but not acknowledged
                await self.bus.ack(claim)
                await self.pause()
        self.fenced += 1

    async def work(self, claim: Claim) -> None:
        if claim.stage == "score" and sum(map(ord, claim.groups[0])) % 10 < 3:
            await self.end(claim.groups[0], Outcome.FILTERED)
            return
        column = COLUMN[claim.stage]
        await self.bus.put({row.id: {column: f"{column} of {row.id}"} for row in claim.rows}, claim.holder)

    # --- trainer

    async def train(self) -> None:
        holder, needs = self.bus.register("train"), frozenset({"tokens", "version", "reward", "ref", "value"})
        serials: list[int] = []
        for step in range(STEPS):
            claims: list[Claim] = []
            while (missing := GROUPS_PER_STEP - sum(len(claim.groups) for claim in claims)) > 0:
                exact = self.rng.random() < 0.3
                claims.append(await self.bus.claim("train", needs, missing, "group", holder, "started", exact))
                await self.pause()
            batch = merge(claims)
            assert await self.bus.ack(batch, retain=step) == batch.groups
            for row in batch.rows:
                assert 0 <= step - row.columns["version"] <= STALENESS
                assert row.columns["tokens"] == f"{row.group} {row.id.split('/')[-2]}"
                assert all(row.columns[c] == f"{c} of {row.id}" for c in ("reward", "ref", "value"))
            serial = {ticket.group: ticket.serial for ticket in self.admission.in_flight()}
            serials += [serial[group] for group in batch.groups]
            assert serials == sorted(serials), "trained in the order of their starts"
            self.trained += batch.groups
            await self.pause()
            self.version = step + 1
            self.admission.step_taken(batch.groups)
            self.admission.identity()
            if step % 3 == 2:
                freed = self.bus.release(step)
                assert {row.group for row in freed} <= set(self.trained)

    # --- death

    async def kill(self) -> None:
        acts: tuple[Callable[[], Awaitable[None]], ...] = (
            self.kill_worker,
            self.replace_worker,
            self.replace_worker,
            self.cancel_a_claim,
            self.kill_rollout,
        )
        while True:
            for _ in range(self.rng.randrange(60)):
                await asyncio.sleep(0)
            await self.rng.choice(acts)()
            self.kills += 1
            self.admission.identity()

    async def kill_worker(self) -> None:
        worker = self.rng.choice(list(WORKERS))
        self.tasks[worker].cancel()
        await self.pause()
        self.employ(worker)

    async def replace_worker(self) -> None:
        """The old incarnation does not know that it is dead, and goes on."""
        worker = self.rng.choice(list(WORKERS))
        self.zombies.append(self.tasks[worker])
        self.employ(worker)

    async def cancel_a_claim(self) -> None:
        holder = self.bus.register("passer-by")
        by, count, needs = STAGES["score"]
        task = asyncio.ensure_future(self.bus.claim("score", needs, count, by, holder))
        await self.pause()
        task.cancel()
        await asyncio.wait({task})
        self.bus.declare_dead(holder)

    async def kill_rollout(self) -> None:
        """Its open groups are evicted and played again; what it had closed stays."""
        self.tasks["rollout"].cancel()
        self.rollout = self.bus.register("rollout")
        await self.pause()
        for group in self.bus.orphans():
            await self.bus.evict(group)
            ticket = self.admission.evict(group)
            if ticket is not None:
                await self.start(ticket)
        self.tasks["rollout"] = asyncio.ensure_future(self.play_all())
