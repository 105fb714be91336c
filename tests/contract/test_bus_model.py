"""The bus agrees, claim by claim, with a model that looks through all its rows each time; and never does so itself."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_core.bus import Bus, By, Claim, Holder, Order

COLUMNS = ("a", "b", "c")
STAGES: dict[str, tuple[frozenset[str], By, Order]] = {
    "any by group": (frozenset("a"), "group", "any"),
    "any by row": (frozenset("ab"), "row", "any"),
    "started by group": (frozenset("ab"), "group", "started"),
    "started by row": (frozenset("a"), "row", "started"),
    "finished by group": (frozenset("bc"), "group", "finished"),
    "finished by row": (frozenset("c"), "row", "finished"),
}


@dataclass
class Rows:
    """One group of the model: when each column of each row came, and what each stage did with its units."""

    serial: int
    closed: int | None = None
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    created: dict[str, int] = field(default_factory=dict)
    done: set[tuple[str, str]] = field(default_factory=set)
    held: dict[tuple[str, str], Holder] = field(default_factory=dict)

    def complete(self, row: str, needs: frozenset[str]) -> int | None:
        if self.closed is None or not needs <= self.rows[row].keys():
            return None
        return max(self.closed, self.created[row], *(self.rows[row][name] for name in needs))


@settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
class BusAgainstModel(RuleBasedStateMachine):
    @initialize(early=st.sets(st.sampled_from(sorted(STAGES))))
    def begin(self, early: set[str]) -> None:
        self.loop = asyncio.new_event_loop()
        self.bus = Bus(10_000, 10_000_000)
        self.groups: dict[str, Rows] = {}
        self.retained: dict[int, int] = {}
        self.holders = [self.bus.register(f"holder-{i}") for i in range(2)]
        self.claims: list[Claim] = []
        self.claimed: set[str] = set()
        self.clock = self.serial = 0
        for stage in early:
            self.claim(stage, 1, False, 0)

    def do(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def any_group(self, data: st.DataObject, *, closed: bool | None = None) -> str | None:
        names = [name for name, g in self.groups.items() if closed is None or (g.closed is not None) == closed]
        return data.draw(st.sampled_from(names)) if names else None

    # --- rules

    @rule(gap=st.integers(1, 3), rows=st.integers(0, 3), close=st.booleans(), names=st.sets(st.sampled_from(COLUMNS)))
    def play(self, gap: int, rows: int, close: bool, names: set[str]) -> None:
        self.serial += gap
        name, group = f"task/{self.serial}@0", Rows(self.serial)
        self.groups[name] = group
        self.do(self.bus.open_group(name, self.serial, None, self.holders[0]))
        self.add_rows(name, rows, names)
        if close:
            self.close(name)

    def add_rows(self, name: str, count: int, names: set[str]) -> None:
        group, stamp = self.groups[name], self.tick()
        new = [f"{name}/{len(group.rows) + i}/0" for i in range(count)]
        for row in new:
            group.rows[row], group.created[row] = dict.fromkeys(names, stamp), stamp
        self.do(self.bus.put({row: dict.fromkeys(names, row) for row in new}, self.holders[0], name))

    def close(self, name: str) -> None:
        self.groups[name].closed = self.tick()
        self.do(self.bus.close_group(name, len(self.groups[name].rows), self.holders[0]))

    @rule(data=st.data(), count=st.integers(0, 2), names=st.sets(st.sampled_from(COLUMNS)))
    def play_on(self, data: st.DataObject, count: int, names: set[str]) -> None:
        if name := self.any_group(data, closed=False):
            self.add_rows(name, count, names)
            self.close(name)

    @rule(data=st.data(), names=st.sets(st.sampled_from(COLUMNS), min_size=1))
    def add_columns(self, data: st.DataObject, names: set[str]) -> None:
        """To some rows of up to two groups; each gets what it lacks."""
        stamp, given = self.tick(), {}
        for name in {self.any_group(data), self.any_group(data)} - {None}:
            rows = self.groups[name or ""].rows
            for row in data.draw(st.lists(st.sampled_from(sorted(rows)), unique=True)) if rows else []:
                if new := names - rows[row].keys():
                    given[row] = dict.fromkeys(new, row)
                    rows[row].update(dict.fromkeys(new, stamp))
        self.do(self.bus.put(given, self.holders[1]))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if name := self.any_group(data):
            self.do(self.bus.evict(name))
            del self.groups[name]

    @rule(
        stage=st.sampled_from(sorted(STAGES)), count=st.integers(1, 4), exact=st.booleans(), who=st.sampled_from((0, 1))
    )
    def claim(self, stage: str, count: int, exact: bool, who: int) -> None:
        self.claimed.add(stage)
        expected = self.claimable(stage)[:count]
        needs, by, order = STAGES[stage]
        call = self.bus.claim(stage, needs, count, by, self.holders[who], order, exact)
        if not expected or (exact and len(expected) < count):
            self.do(self.waits(call))
            return
        claim: Claim = self.do(call)
        rows = [row.id for row in claim.rows]
        if by == "row":
            assert rows == [unit for _, unit in expected]
        else:
            assert list(claim.groups) == [unit for _, unit in expected]
            assert rows == [row for name in claim.groups for row in self.groups[name].rows]
        assert all(row.columns == dict.fromkeys(needs, row.id) for row in claim.rows)
        for name, unit in expected:
            self.groups[name].held[stage, unit] = self.holders[who]
        self.claims.append(claim)

    async def waits(self, call: Coroutine[Any, Any, Claim]) -> None:
        task = asyncio.ensure_future(call)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done(), f"should wait, and got {task}"
        task.cancel()
        await asyncio.wait({task})

    def claimable(self, stage: str) -> list[tuple[str, str]]:
        """(group, unit) in the order in which the stage gets them."""
        needs, by, order = STAGES[stage]
        found: list[tuple[tuple[int, ...], str, str]] = []
        for name, group in sorted(self.groups.items(), key=lambda item: item[1].serial):
            times = [group.complete(row, needs) for row in group.rows]
            whole = None if group.closed is None or None in times else max([group.closed, *map(int, times)])  # type: ignore[arg-type]
            units = [(name, whole)] if by == "group" else list(zip(group.rows, times, strict=True))
            for place, (unit, time) in enumerate(units):
                if (stage, unit) in group.done or (stage, unit) in group.held:
                    continue
                if time is not None:
                    found.append(((time if order == "finished" else 0, group.serial, place), name, unit))
                elif order == "started":
                    return [(n, u) for _, n, u in found]
            if group.closed is None and order == "started":
                break
        return [(name, unit) for _, name, unit in sorted(found)]

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), retain=st.booleans())
    def ack(self, data: st.DataObject, retain: bool) -> None:
        claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        by = STAGES[claim.stage][1]
        units = [(g, g) for g in claim.groups] if by == "group" else [(row.group, row.id) for row in claim.rows]
        there = [(name, unit) for name, unit in units if name in self.groups]
        step = self.clock % 3 if retain and by == "group" else None
        assert self.do(self.bus.ack(claim, step)) == tuple(dict.fromkeys(name for name, _ in there))
        for name, unit in there:
            del self.groups[name].held[claim.stage, unit]
            self.groups[name].done.add((claim.stage, unit))
            if step is not None:
                self.retained[step] = self.retained.get(step, 0) + len(self.groups.pop(name).rows)

    @rule(who=st.sampled_from((0, 1)))
    def die(self, who: int) -> None:
        dead, self.holders[who] = self.holders[who], self.bus.register(f"holder-{who}")
        self.claims = [claim for claim in self.claims if claim.holder != dead]
        for group in self.groups.values():
            group.held = {key: holder for key, holder in group.held.items() if holder != dead}

    @rule(step=st.integers(0, 2))
    def release(self, step: int) -> None:
        freed = sum(self.retained.pop(s) for s in list(self.retained) if s <= step)
        assert len(self.bus.release(step)) == freed

    @rule()
    def restart(self) -> None:
        state = pickle.loads(pickle.dumps(self.bus.snapshot()))
        self.bus = Bus(10_000, 10_000_000)
        self.bus.restore(state)
        self.holders = [self.bus.register(f"holder-{i}") for i in range(2)]
        self.groups = {name: group for name, group in self.groups.items() if group.closed is not None}
        self.claims, self.retained, self.claimed = [], {}, set()
        for group in self.groups.values():
            group.held = {}

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "bus"):
            living = sum(len(group.rows) for group in self.groups.values())
            assert self.bus.rows == living + sum(self.retained.values())
            assert self.bus.groups == len(self.groups)
            for stage, (needs, by, order) in STAGES.items():
                if order == "any" or stage in self.claimed:
                    assert self.bus.ready(stage, needs, by) == len(self.claimable(stage)), stage


BusAgainstModel.TestCase.settings = settings(BusAgainstModel.TestCase.settings, derandomize=True)
test_bus_agrees_with_its_model = BusAgainstModel.TestCase


def lines_run(call: Callable[[], None]) -> int:
    """How many lines of the bus's code run."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "relax_core" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_no_call_gets_slower_with_more_rows() -> None:
    """Work is counted in lines run, on a bus with few and with many groups, open, waiting, claimed and trained."""

    def work(groups: int) -> int:
        loop = asyncio.new_event_loop()
        bus = Bus(1_000_000, 10**9)
        x = bus.register("x")

        async def fill() -> None:
            for i in range(groups):
                await bus.open_group(f"t{i}", i, None, x)
                if i % 5:
                    await bus.put({f"t{i}/{m}/0": {"a": m} for m in range(4)}, x, f"t{i}")
                    await bus.close_group(f"t{i}", 4, x)
            for order in ("any", "finished"):
                claim = await bus.claim(order, frozenset("a"), groups // 5, "group", x, order)
                await bus.ack(claim, retain=0)
            await bus.claim("rows", frozenset("a"), groups // 5, "row", x)

        loop.run_until_complete(fill())
        new = f"t{groups}"

        async def calls() -> None:
            await bus.open_group(new, groups, None, x)
            await bus.put({f"{new}/{m}/0": {"a": m} for m in range(4)}, x, new)
            await bus.close_group(new, 4, x)
            await bus.put({f"{new}/{m}/0": {"b": m} for m in range(4)}, x)
            await bus.ack(await bus.claim("any", frozenset("a"), 2, "group", x), retain=1)
            await bus.ack(await bus.claim("rows", frozenset("a"), 2, "row", x))
            await bus.evict(new)
            bus.release(-1)

        counted = lines_run(lambda: loop.run_until_complete(calls()))
        loop.close()
        return counted

    assert work(50) == work(5000)
