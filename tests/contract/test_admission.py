"""Admission: slots, the accounting identity, and a whole run in virtual time that never slows down."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_core.admission import Admission, Outcome, Ticket
from relax_core.errors import RelaxError


def name(admission: Admission) -> str:
    return f"env/{admission.next_position}#0@0"


def start(admission: Admission, count: int = 1) -> list[str]:
    return [admission.start(name(admission)).group for _ in range(count)]


# --- single rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_slots_are_limited_by_staleness(staleness: int) -> None:
    admission = Admission(groups_per_step=4, max_staleness=staleness, max_replays=0)
    groups = []
    while admission.open():
        groups += start(admission)
    assert len(groups) == 4 * (staleness + 1)
    with pytest.raises(RelaxError, match="no group may start"):
        admission.start(name(admission))
    admission.step_taken(groups[:4])
    assert len(start(admission, 4)) == 4 and not admission.open()


@pytest.mark.parametrize("outcome", [Outcome.FILTERED, Outcome.FAILED, Outcome.DROPPED])
def test_every_other_end_gives_the_slot_back(outcome: Outcome) -> None:
    admission = Admission(2, 0, 3)
    first, second = start(admission, 2)
    admission.end(first, outcome)
    assert admission.open()
    assert start(admission) == ["env/2#0@0"]
    assert not admission.open()
    assert admission.counters()[outcome.value] == 1
    assert admission.identity().startswith("issued 3 = trained 0")
    with pytest.raises(RelaxError, match="not in flight"):
        admission.end(first, outcome)
    with pytest.raises(RelaxError, match="step_taken"):
        admission.end(second, Outcome.TRAINED)
    assert admission.dropped_tasks == (["env/0#0"] if outcome is Outcome.DROPPED else [])


def test_a_skipped_step_counts_as_taken_and_its_groups_as_trained() -> None:
    admission = Admission(2, 0, 3)
    admission.step_taken(start(admission, 2), skipped=True)
    assert (admission.steps_taken, admission.steps_skipped, admission.trained) == (1, 1, 2)
    assert admission.open()


def test_a_step_trains_exactly_its_groups() -> None:
    admission = Admission(2, 1, 3)
    a, b, c, _ = start(admission, 4)
    for groups, words in (
        ([a], "1 groups"),
        ([a, b, c], "3 groups"),
        ([a, b, a], "2 of them"),
        ([a, "x"], "flight: x"),
    ):
        with pytest.raises(RelaxError, match=words):
            admission.step_taken(groups)
    assert (admission.steps_taken, admission.trained, len(admission.in_flight())) == (0, 0, 4)
    admission.step_taken([b, a])


def test_an_evicted_group_is_played_again_and_then_dropped() -> None:
    admission = Admission(2, 0, max_replays=2)
    group, other = start(admission, 2)
    for attempt in (1, 2):
        ticket = admission.evict(group)
        assert ticket == Ticket(f"env/0#0@{attempt}", serial=1 + attempt, position=0, attempt=attempt)
        assert not admission.open(), "it keeps its slot"
        assert [t.group for t in admission.in_flight()] == [other, ticket.group], "and starts anew"
        with pytest.raises(RelaxError, match="not in flight"):
            admission.evict(group)
        group = ticket.group
    assert admission.evict(group) is None
    assert admission.counters() == {
        "issued": 2, "trained": 0, "filtered": 0, "failed": 0, "dropped": 1, "evicted": 3, "in_flight": 1,
    }  # fmt: skip
    assert admission.dropped_tasks == ["env/0#0"]
    assert admission.open()


def test_no_group_starts_that_no_step_would_train() -> None:
    admission = Admission(2, 2, 0, steps=2)
    groups = start(admission, 4)
    assert not admission.open()
    admission.end(groups[0], Outcome.FILTERED, "all rewards are 1")
    assert admission.state()["reasons"] == {"all rewards are 1": 1}
    groups += start(admission)
    admission.step_taken(groups[1:3])
    admission.step_taken(groups[3:])
    assert not admission.open() and admission.counters()["in_flight"] == 0


def test_a_name_that_cannot_be_takes_no_slot() -> None:
    admission = Admission(2, 0, 0)
    for wrong in ("env/0", "env/0@1"):
        with pytest.raises(RelaxError, match="<task id>@0"):
            admission.start(wrong)
    first = admission.start(name(admission)).group
    with pytest.raises(RelaxError, match="unique"):
        admission.start(first)
    assert admission.counters()["issued"] == 1
    assert admission.start(name(admission)).position == 1


def test_a_broken_identity_is_reported() -> None:
    admission = Admission(2, 0, 0)
    start(admission)
    assert admission.identity() == "issued 1 = trained 0 + filtered 0 + failed 0 + dropped 0 + in flight 1"
    admission.filtered += 1
    with pytest.raises(RelaxError, match="issued 1 is not"):
        admission.identity()


def test_state_is_json_and_a_restored_admission_goes_on_alike() -> None:
    def play_on(admission: Admission) -> object:
        ticket = admission.evict("env/1#0@1")
        admission.end("env/3#0@0", Outcome.FAILED)
        started = start(admission)
        return ticket, started, admission.in_flight(), admission.identity(), admission.state(), admission.open()

    admission = Admission(2, 1, max_replays=2)
    groups = start(admission, 4)
    admission.evict(groups[1])
    admission.step_taken([groups[0], groups[2]], skipped=True)
    start(admission)
    admission.evict("env/4#0@0")
    admission.end("env/4#0@1", Outcome.DROPPED)
    restored = Admission(2, 1, max_replays=2)
    restored.restore(json.loads(json.dumps(admission.state())))
    assert restored.state() == admission.state()
    assert [t.attempt for t in restored.in_flight()] == [0, 1]
    assert play_on(restored) == play_on(admission)


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_ends_with_a_free_slot_and_one_slot_serves_one() -> None:
    async def main() -> None:
        admission = Admission(1, 0, max_replays=0)
        await admission.wait_open()
        started = start(admission)

        async def player() -> None:
            await admission.wait_open()
            started.extend(start(admission))

        players = [asyncio.ensure_future(player()) for _ in range(3)]
        frees: list[Callable[[], object]] = [
            lambda: admission.end(started[-1], Outcome.FILTERED),
            lambda: admission.step_taken(started[-1:]),
            lambda: admission.evict(started[-1]),
        ]
        for i, free in enumerate(frees):
            await asyncio.sleep(0)
            assert len(started) == 1 + i
            free()
            for _ in range(5):
                await asyncio.sleep(0)
        assert len(started) == 4
        await asyncio.gather(*players)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_cancelled_wait_takes_nothing_and_a_restore_wakes() -> None:
    async def main() -> None:
        admission, fuller = Admission(1, 0, 0), Admission(1, 0, 0)
        empty = admission.state()
        start(admission)
        start(fuller)
        cancelled, waiting = [asyncio.ensure_future(admission.wait_open()) for _ in range(2)]
        await asyncio.sleep(0)
        cancelled.cancel()
        admission.restore(empty)
        await waiting
        await asyncio.wait({cancelled})
        assert cancelled.cancelled() and admission.open()

    asyncio.run(asyncio.wait_for(main(), 10))


# --- any sequence of events -------------------------------------------------------------------------------------------


class AnyEvents(RuleBasedStateMachine):
    """A trainer that takes groups in the order of their starts trains each in time, whatever happens to the others."""

    @initialize(groups=st.integers(1, 3), staleness=st.integers(0, 2), replays=st.integers(0, 2))
    def begin(self, groups: int, staleness: int, replays: int) -> None:
        self.settings = (groups, staleness, replays)
        self.admission = Admission(*self.settings)
        self.started_at: dict[str, int] = {}
        self.ended = 0

    @precondition(lambda self: self.admission.open())
    @rule(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        while count and self.admission.open():
            self.started_at[self.admission.start(name(self.admission)).group] = self.admission.steps_taken
            count -= 1

    def any_group(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.admission.in_flight())).group

    @precondition(lambda self: self.admission.in_flight())
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.FILTERED, Outcome.FAILED, Outcome.DROPPED]))
    def end(self, data: st.DataObject, outcome: Outcome) -> None:
        self.admission.end(self.any_group(data), outcome)
        self.ended += 1

    @precondition(lambda self: self.admission.in_flight())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ticket = self.admission.evict(self.any_group(data))
        if ticket is None:
            self.ended += 1
        else:
            assert ticket == self.admission.in_flight()[-1] and 1 <= ticket.attempt <= self.settings[2]
            self.started_at[ticket.group] = self.admission.steps_taken

    @precondition(lambda self: len(self.admission.in_flight()) >= self.settings[0])
    @rule(skipped=st.booleans())
    def step(self, skipped: bool) -> None:
        groups = [ticket.group for ticket in self.admission.in_flight()[: self.settings[0]]]
        for group in groups:
            assert self.admission.steps_taken - self.started_at[group] <= self.settings[1]
        self.admission.step_taken(groups, skipped)

    @rule()
    def restart(self) -> None:
        state = json.loads(json.dumps(self.admission.state()))
        self.admission = Admission(*self.settings)
        self.admission.restore(state)

    @invariant()
    def the_identity_holds(self) -> None:
        if hasattr(self, "admission"):
            admission, (groups, staleness, _) = self.admission, self.settings
            admission.identity()
            assert admission.trained == admission.steps_taken * groups
            assert admission.filtered + admission.failed + admission.dropped == self.ended
            assert admission.dropped == len(admission.dropped_tasks)
            assert len(admission.in_flight()) <= (staleness + 1) * groups
            assert admission.open() == (len(admission.in_flight()) < (staleness + 1) * groups)


test_any_sequence_of_events = AnyEvents.TestCase
test_any_sequence_of_events.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


# --- a run in virtual time --------------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """Groups play for a long-tailed number of ticks; then 30 % are filtered and 10 % failed. A step takes 5 ticks.

    The trainer takes groups in the order of their starts and waits for one that is not there yet.
    """

    groups_per_step: int
    staleness: int
    seed: int
    now: int = 0
    step_ends: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    played_ticks: list[int] = field(default_factory=list)
    trained_ticks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.admission = Admission(self.groups_per_step, self.staleness, max_replays=3)
        self.events: list[tuple[int, int, str]] = []
        self.version_at_start: dict[str, int] = {}
        self.ticks: dict[str, int] = {}
        self.kept: set[str] = set()
        self.training: list[str] = []

    def run(self, steps: int) -> None:
        while self.admission.steps_taken < steps:
            self.start_groups()
            self.start_step()
            assert self.events, "the run stands still"
            self.now, _, event = heapq.heappop(self.events)
            self.step_end() if event == "step" else self.play_end(event)
            self.admission.identity()

    def at(self, ticks: int, event: str) -> None:
        heapq.heappush(self.events, (self.now + ticks, self.rng.getrandbits(30), event))

    def start_groups(self) -> None:
        while self.admission.open():
            ticket = self.admission.start(name(self.admission))
            self.version_at_start[ticket.group] = self.admission.steps_taken
            self.ticks[ticket.group] = min(1 + int(self.rng.paretovariate(1.5)), 60)
            self.at(self.ticks[ticket.group], ticket.group)

    def play_end(self, group: str) -> None:
        fate = self.rng.random()
        if fate < 0.4:
            self.admission.end(group, Outcome.FILTERED if fate < 0.3 else Outcome.FAILED)
        else:
            self.kept.add(group)
            self.played_ticks.append(self.ticks[group])

    def start_step(self) -> None:
        first = [ticket.group for ticket in self.admission.in_flight()[: self.groups_per_step]]
        if not self.training and len(first) == self.groups_per_step and self.kept.issuperset(first):
            self.training = first
            self.lags += [self.admission.steps_taken - self.version_at_start[group] for group in first]
            self.trained_ticks += [self.ticks[group] for group in first]
            self.at(5, "step")

    def step_end(self) -> None:
        self.admission.step_taken(self.training)
        self.training = []
        self.step_ends.append(self.now)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_with_filtered_and_failed_groups_ends_as_fast_as_it_began(staleness: int) -> None:
    steps, quarter = 400, 100
    runs = [Simulation(8, staleness, seed) for seed in range(6)]
    for run in runs:
        run.run(steps)
        assert run.admission.trained == steps * 8, "every step has exactly its groups"
        assert max(run.lags) == staleness, "the bound holds, and is reached"
        counts = run.admission.counters()
        assert counts["filtered"] / counts["issued"] == pytest.approx(0.3, abs=0.03)
        assert counts["failed"] / counts["issued"] == pytest.approx(0.1, abs=0.02)
        assert counts["evicted"] == counts["dropped"] == 0
        # No survivorship bias: what is trained is as long as what was played and kept; few are in flight at the end.
        played, trained = (sum(ticks) / len(ticks) for ticks in (run.played_ticks, run.trained_ticks))
        assert trained == pytest.approx(played, rel=0.01)
    first = sum(run.step_ends[quarter - 1] for run in runs)
    last = sum(run.step_ends[-1] - run.step_ends[-quarter - 1] for run in runs)
    assert last == pytest.approx(first, rel=0.1)


def test_staleness_buys_speed() -> None:
    """What the number is for: with 1 or 2, playing and training overlap and stragglers are waited for less."""
    ends = []
    for staleness in (0, 1, 2):
        run = Simulation(8, staleness, seed=0)
        run.run(300)
        ends.append(run.now)
    assert ends[1] < 0.8 * ends[0] and ends[2] < 0.9 * ends[1]
