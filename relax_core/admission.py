"""Admission: which groups may start, and the accounting identity of a run.

    issued = trained + filtered + failed + dropped + in flight

A group holds a slot from its start until it is trained, filtered, failed or dropped, and starts only while

    slots in use + groups trained < (steps taken + max_staleness + 1) * groups_per_step.

The sum on the left never grows but by a start and the right side never shrinks, so at any time at most
``(max_staleness + 1) * groups_per_step`` groups are in flight. A trainer that takes them in the order of their start
therefore trains each at most ``max_staleness`` steps after it started, a replayed one included: no row exceeds the
bound on lag.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from relax_core.errors import RelaxError


class Outcome(StrEnum):
    """How a group ends."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One group in flight: playing, or waiting to be trained.

    ``serial`` counts starts, replays included; ``position`` is the task's place in the stream of tasks; ``attempt``
    counts from 0. ``group`` is ``<task id>@<attempt>``.
    """

    group: str
    serial: int
    position: int
    attempt: int

    @property
    def task(self) -> str:
        return self.group.rpartition("@")[0]


class Admission:
    """Slots and counters. ``steps``: the run's number of steps, if no group shall start that no step would train.

    Counters: ``issued`` (a group counts once), ``trained``, ``filtered``, ``failed``, ``dropped``; ``evicted`` counts
    events and ``steps_taken`` and ``steps_skipped`` count steps: these three stand outside the identity.
    ``dropped_tasks`` names the tasks given up after ``max_replays`` replays.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, max_replays: int, steps: int | None = None) -> None:
        self.groups_per_step, self.max_staleness, self.max_replays = groups_per_step, max_staleness, max_replays
        self.steps = steps
        self.issued = self.trained = self.filtered = self.failed = self.dropped = 0
        self.evicted = self.steps_taken = self.steps_skipped = 0
        self.dropped_tasks: list[str] = []
        self.reasons: Counter[str] = Counter()
        """Filtered groups by reason."""
        self._next_position = 0
        self._next_serial = 0
        self._tickets: dict[str, Ticket] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._held = False

    @property
    def next_position(self) -> int:
        """The place in the stream of tasks that the next new group takes."""
        return self._next_position

    # --- starting -----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """No group starts until ``free``: a version is being published, and what starts next must sample from it."""
        self._held = True

    def free(self) -> None:
        """Engines serve the newest version."""
        self._held = False
        self._wake()

    def open(self) -> bool:
        """Whether a group may start now."""
        if self._held:
            return False
        steps = self.steps_taken + self.max_staleness + 1
        if self.steps is not None:
            steps = min(steps, self.steps)
        return len(self._tickets) + self.trained < steps * self.groups_per_step

    async def wait_open(self) -> None:
        """Wait until a group may start. Call ``start`` before the next await: others may have waited too."""
        while not self.open():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                if future in self._waiting:
                    self._waiting.remove(future)

    def start(self, group: str) -> Ticket:
        """Take a slot for the task at ``next_position``; ``group`` is ``<task id>@0``.

        Raises RelaxError when admission is closed or the id is not of that form or in flight; then no slot is taken.
        """
        if not self.open():
            raise RelaxError("admission: no group may start now; wait for wait_open() before start()")
        if not group.endswith("@0") or group in self._tickets:
            raise RelaxError(f"admission: group id {group!r}; give <task id>@0, with an id unique in the run")
        self.issued += 1
        self._next_position += 1
        return self._ticket(group, self._next_position - 1, 0)

    def _ticket(self, group: str, position: int, attempt: int) -> Ticket:
        ticket = self._tickets[group] = Ticket(group, self._next_serial, position, attempt)
        self._next_serial += 1
        return ticket

    # --- ending -------------------------------------------------------------------------------------------------------

    def end(self, group: str, outcome: Outcome, reason: str | None = None) -> None:
        """Give the slot of a filtered, failed or dropped group back; trained ones end by ``step_taken``.

        ``reason``: why it was filtered, to be counted. Raises RelaxError for a group that is not in flight.
        """
        if outcome is Outcome.TRAINED:
            raise RelaxError(
                f"admission: group {group!r} cannot end as trained by itself; report the step: step_taken()"
            )
        ticket = self._take(group)
        if outcome is Outcome.DROPPED:
            self.dropped_tasks.append(ticket.task)
        if reason is not None:
            self.reasons[reason] += 1
        setattr(self, outcome.value, getattr(self, outcome.value) + 1)
        self._wake()

    def evict(self, group: str) -> Ticket | None:
        """The group was evicted: its task is to be played again, under the ticket returned, or was dropped (None).

        The replay keeps the slot and starts anew: it has the next serial, so it is last in the order of starts, which
        is still in time (see the module), and delays none that started before. Raises RelaxError for a group that is
        not in flight.
        """
        ticket = self._take(group)
        self.evicted += 1
        if ticket.attempt >= self.max_replays:
            self.dropped += 1
            self.dropped_tasks.append(ticket.task)
            self._wake()
            return None
        attempt = ticket.attempt + 1
        return self._ticket(f"{ticket.task}@{attempt}", ticket.position, attempt)

    def step_taken(self, groups: Sequence[str], skipped: bool = False) -> None:
        """A step trained these groups, or skipped them: they count as trained all the same, and the step as taken.

        What starts next must sample from the step's weights: ``hold`` until engines serve them. Raises RelaxError when
        a group is not in flight, or when there are not exactly ``groups_per_step``: the bound on lag rests on it.
        """
        strangers = sorted(set(groups) - set(self._tickets))
        if strangers or len(set(groups)) != self.groups_per_step or len(groups) != self.groups_per_step:
            n = f"{len(groups)} groups, {len(set(groups))} of them different"
            found = f"groups not in flight: {', '.join(strangers)}" if strangers else n
            raise RelaxError(f"admission: a step with {found}; a step trains exactly {self.groups_per_step} in flight")
        for group in groups:
            del self._tickets[group]
        self.trained += len(groups)
        self.steps_taken += 1
        self.steps_skipped += skipped
        self._wake()

    def _take(self, group: str) -> Ticket:
        if group not in self._tickets:
            raise RelaxError(f"admission: group {group!r} is not in flight; a group ends once")
        return self._tickets.pop(group)

    def _wake(self) -> None:
        if self.open():
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
            self._waiting = []

    # --- accounts -----------------------------------------------------------------------------------------------------

    def in_flight(self) -> list[Ticket]:
        """The tickets of all groups in flight, in the order of their starts."""
        return sorted(self._tickets.values(), key=lambda ticket: ticket.serial)

    def counters(self) -> dict[str, int]:
        return {
            "issued": self.issued,
            "trained": self.trained,
            "filtered": self.filtered,
            "failed": self.failed,
            "dropped": self.dropped,
            "evicted": self.evicted,
            "in_flight": len(self._tickets),
        }

    def identity(self) -> str:
        """The accounting identity in words, to be printed. Raises RelaxError if it does not hold."""
        ended = ("trained", "filtered", "failed", "dropped", "in_flight")
        counts = self.counters()
        text = " + ".join(f"{name.replace('_', ' ')} {counts[name]}" for name in ended)
        if counts["issued"] != sum(counts[name] for name in ended):
            raise RelaxError(f"admission: issued {counts['issued']} is not {text}: a fault of Relax; please report it")
        return f"issued {counts['issued']} = {text}"

    def state(self) -> dict[str, Any]:
        """JSON values: counters, positions and the groups in flight."""
        counts = {name: n for name, n in self.counters().items() if name != "in_flight"}
        return {
            **counts,
            "steps_taken": self.steps_taken,
            "steps_skipped": self.steps_skipped,
            "next_position": self._next_position,
            "next_serial": self._next_serial,
            "dropped_tasks": list(self.dropped_tasks),
            "reasons": dict(self.reasons),
            "in_flight": [asdict(ticket) for ticket in self.in_flight()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Groups in flight keep their tickets: those not on the bus are played again."""
        for name in ("issued", "trained", "filtered", "failed", "dropped", "evicted", "steps_taken", "steps_skipped"):
            setattr(self, name, state[name])
        self._next_position, self._next_serial = state["next_position"], state["next_serial"]
        self.dropped_tasks = list(state["dropped_tasks"])
        self.reasons = Counter(state["reasons"])
        tickets = [Ticket(**ticket) for ticket in state["in_flight"]]
        self._tickets = {ticket.group: ticket for ticket in tickets}
        self._wake()
