"""The bus's contract, second part: finished work, groups that leave, bounds, snapshots, cancelled waits, the end."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from relax_core.bus import BusClosed, BusError, Claim
from relax_core.errors import FencedError
from relax_core.testing.bus_kit import PLAYED, SCORED, Check, Kit, ids, play, played, score, train

# --- finished work ----------------------------------------------------------------------------------------------------


async def check_finishing_is_putting_and_acknowledging(kit: Kit) -> None:
    bus = kit.bus()
    rollout, stage = bus.register("rollout"), bus.register("score")
    for serial, group in enumerate("abcd"):
        await play(bus, rollout, group, serial)
    claims = [await bus.claim("score", PLAYED, 1, "group", stage) for _ in range(3)]
    with pytest.raises(BusError, match="write-once"):
        await bus.finish(claims[0], {"a/0/0": {"tokens": "others"}})
    with pytest.raises(BusError, match="acks 'd' for 'score'"):
        await bus.finish(Claim("score", stage, (), ("a", "d")), played("a", column="reward"))
    assert await bus.finish(claims[0], played("a", column="reward")) == ("a",)  # both errors changed nothing
    await bus.evict("b")
    assert await bus.finish(claims[1], played("b", column="reward")) == () and bus.late == 3
    again = bus.register("score")
    with pytest.raises(FencedError):
        await bus.finish(claims[2], played("c", column="reward"))
    claim = await train(bus, rollout, 3, SCORED)
    assert [dict(row.columns) for row in claim.rows] == [
        {"tokens": f"tokens a/{m}", "reward": f"reward a/{m}"} for m in range(2)
    ]
    assert (await bus.claim("score", PLAYED, 3, "group", again)).groups == ("c", "d")


# --- leaving ----------------------------------------------------------------------------------------------------------


async def check_a_group_may_have_no_rows(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await bus.open_group("a", 0, None, holder)
    await bus.close_group("a", 0, holder)
    await play(bus, holder, "b", 1)
    claim = await train(bus, holder, 2, order="started")
    assert claim.groups == ("a", "b") and ids(claim) == ["b/0/0", "b/1/0"]
    assert ids(await bus.claim("score", PLAYED, 9, "row", holder)) == ["b/0/0", "b/1/0"]
    assert await bus.ack(claim, retain=0) == ("a", "b")


async def check_evicted_groups_leave_without_a_trace(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    for serial, group in enumerate("abc"):
        await play(bus, holder, group, serial)
    claim = await train(bus, holder, 2)
    assert [row.id for row in await bus.evict("a")] == ["a/0/0", "a/1/0"]
    assert await bus.evict("a") == [] and await bus.evict("nobody") == []
    assert await bus.put({"a/0/0": {"reward": 1}, "b/0/0": {"reward": 2}}, holder) == 1
    assert await bus.ack(claim) == ("b",)
    assert bus.late == 2
    assert (bus.rows, bus.groups, bus.holds("a"), bus.holds("b")) == (4, 2, False, True)
    with pytest.raises(BusError, match="'a' was opened"):
        await bus.open_group("a", 7, None, holder)


async def check_a_group_evicted_while_open_may_be_opened_again(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await bus.open_group("a", 0, None, holder)
    await bus.put(played("a"), holder, "a")
    await bus.evict("a")
    assert bus.rows == 0
    assert await bus.put(played("a", first=2), holder, "a") == 0
    assert await bus.close_group("a", 2, holder) is False
    assert bus.late == 3
    await play(bus, holder, "a", 1)
    assert (await train(bus, holder, 1)).groups == ("a",)


async def check_trained_rows_stay_until_released(kit: Kit) -> None:
    bus = kit.bus()
    holder, late = bus.register("train"), bus.register("reference")
    for serial, group in enumerate("abcd"):
        await play(bus, holder, group, serial)
    reference = await bus.claim("reference", PLAYED, 1, "group", late)
    for step in range(2):
        claim = await train(bus, holder, 2, order="started")
        assert await bus.ack(claim, retain=step) == claim.groups
    assert (bus.groups, bus.rows, bus.retained_rows) == (0, 8, 8)
    assert bus.bytes > 0 and bus.held_rows() == []
    assert await bus.evict("a") == []  # trained is trained
    assert await bus.put(played("a", column="ref"), late) == 0 and await bus.ack(reference) == ()
    assert [row.id for row in bus.retained(1)] == ["c/0/0", "c/1/0", "d/0/0", "d/1/0"]
    freed = bus.release(0)
    assert [(row.id, row.group, dict(row.columns)) for row in freed][:1] == [("a/0/0", "a", {"tokens": "tokens a/0"})]
    assert (len(freed), bus.rows, bus.retained_rows, bus.retained(0)) == (4, 4, 4, [])
    assert len(bus.release(5)) == 4 and bus.release(5) == []
    assert (bus.rows, bus.bytes) == (0, 0)
    await play(bus, holder, "e", 4)
    rows = await bus.claim("score", PLAYED, 1, "row", holder)
    with pytest.raises(BusError, match="by groups"):
        await bus.ack(rows, retain=3)


async def check_close_ends_every_wait(kit: Kit) -> None:
    bus = kit.bus(max_rows=2)
    holder, other = bus.register("x"), bus.register("y")
    await play(bus, holder, "a", 0)
    await bus.open_group("b", 1, None, holder)
    claim = await train(bus, holder, 1)
    waiting = [
        await kit.waits(bus.put(played("b"), holder, "b")),
        await kit.waits(train(bus, other, 1)),
        await kit.waits(bus.claim("score", SCORED, 1, "row", other, "started", True)),
    ]
    await bus.close()
    await kit.settle()
    calls: Sequence[Awaitable[Any]] = [*waiting, train(bus, holder, 1), bus.ack(claim), bus.close_group("b", 0, holder)]
    for call in calls:
        with pytest.raises(BusClosed):
            await call
    assert [group.id for group in bus.snapshot().groups] == ["a"]


# --- the bound --------------------------------------------------------------------------------------------------------


async def check_producers_wait_for_rows(kit: Kit) -> None:
    """Trained rows count until released; a release or an eviction wakes whoever waits, the oldest group first."""
    bus = kit.bus(max_rows=5)
    holder, trainer = bus.register("rollout"), bus.register("train")
    await play(bus, holder, "a", 0)
    await play(bus, holder, "b", 1)
    for serial, group in enumerate("cde"):
        await bus.open_group(group, 2 + serial, None, holder)
    assert not bus.full
    e = await kit.waits(bus.put(played("e"), holder, "e"))
    c = await kit.waits(bus.put(played("c"), holder, "c"))
    d = await kit.waits(bus.put(played("d", 1), holder, "d"))  # it would fit, but who started first goes first ...
    assert (bus.rows, bus.full) == (4, True)
    await bus.ack(await train(bus, trainer, 1), retain=0)
    await kit.settle()
    assert not c.done() and not d.done()
    bus.release(0)
    assert await c == 2
    assert await d == 1  # ... and now it does
    await kit.settle()
    assert not e.done() and bus.rows == 5
    await bus.evict("b")
    assert await e == 2
    assert bus.overfull == 0


async def check_producers_wait_for_bytes(kit: Kit) -> None:
    import numpy as np

    bus = kit.bus(max_bytes=10_000)
    holder = bus.register("rollout")
    await bus.open_group("a", 0, None, holder)
    await bus.put({"a/0/0": {"tokens": np.zeros(2000, np.int32), "text": "counts nothing"}}, holder, "a")
    assert 8000 < bus.bytes < 8500
    await bus.open_group("b", 1, None, holder)
    put = await kit.waits(bus.put({"b/0/0": {"tokens": np.zeros(1000, np.int32)}}, holder, "b"))
    await bus.put({"a/0/0": {"logprobs": np.zeros(2000, np.float32)}}, holder)  # more columns never wait, and count
    assert 16000 < bus.bytes < 16500 and not put.done()
    await bus.evict("a")
    assert await put == 1
    assert 4000 < bus.bytes < 4500


async def check_waiting_puts_end_with_their_group(kit: Kit) -> None:
    bus = kit.bus(max_rows=2)
    holder = bus.register("rollout")
    await play(bus, holder, "a", 0)
    await bus.open_group("b", 1, None, holder)
    await bus.open_group("c", 2, None, holder)
    evicted = await kit.waits(bus.put(played("b"), holder, "b"))
    closed = await kit.waits(bus.put(played("c"), holder, "c"))
    await bus.evict("b")
    assert await evicted == 0 and bus.late == 2
    await bus.close_group("c", 0, holder)
    with pytest.raises(BusError, match="closed"):
        await closed
    assert bus.rows == 2 and bus.full  # the rows of a


async def check_a_full_bus_never_stands_still(kit: Kit) -> None:
    """All room is taken by groups that started later, and the trainer waits for the first: it is let in."""
    bus = kit.bus(max_rows=4)
    rollout, scorer, trainer = bus.register("rollout"), bus.register("score"), bus.register("train")
    for serial, group in enumerate("abcd"):
        await bus.open_group(group, serial, None, rollout)
    for group in "cd":
        await bus.put(played(group), rollout, group)
        await bus.close_group(group, 2, rollout)
    go = asyncio.Semaphore(0)

    async def scores() -> None:
        while True:
            claim = await bus.claim("score", PLAYED, 1, "group", scorer)
            await go.acquire()
            await score(bus, scorer, claim.groups[0])
            await bus.ack(claim)

    scoring = asyncio.ensure_future(scores())
    training = await kit.waits(train(bus, trainer, 4, SCORED, order="started"))
    b = await kit.waits(bus.put(played("b"), rollout, "b"))
    a = await kit.waits(bus.put(played("a"), rollout, "a"))
    go.release()
    await kit.settle()
    assert not a.done()  # d is being scored: somebody is at work, and may make room yet
    go.release()
    assert await a == 2
    await kit.settle()
    assert not b.done() and (bus.rows, bus.overfull) == (6, 2)
    await bus.close_group("a", 2, rollout)
    go.release()
    claim = await training
    assert claim.groups == ("a",)
    await bus.ack(claim, retain=0)
    bus.release(0)
    await kit.settle()
    assert not b.done() and bus.rows == 4  # at the bound again; the trainer is at work
    training = asyncio.ensure_future(train(bus, trainer, 4, SCORED, order="started"))
    assert await b == 2
    scoring.cancel()
    training.cancel()


# --- snapshots --------------------------------------------------------------------------------------------------------


async def check_a_snapshot_keeps_what_is_done(kit: Kit) -> None:
    """Half-processed stages go on; claims and open groups are not in it; trained groups are not; order is kept."""
    bus = kit.bus()
    old = bus.register("worker")
    for serial, group in enumerate("abcd"):
        await play(bus, old, group, serial, rows=3)
    await bus.open_group("open", 4, None, old)
    await bus.put(played("open"), old, "open")
    await bus.ack(await train(bus, old, 1), retain=0)  # a
    await train(bus, old, 1)  # b: claimed, not acked
    half = await bus.claim("score", PLAYED, 2, "row", old)
    assert ids(half) == ["b/0/0", "b/1/0"]
    await bus.put({row.id: {"reward": 1} for row in half.rows}, old)
    await bus.ack(Claim("score", old, half.rows[:1], ()))  # b/0/0: done; b/1/0: put, not acked
    for group in "dc":
        await bus.put(played(group, 3, "value"), old)

    saved = pickle.dumps(bus.snapshot())
    await bus.evict("c")  # later changes are not in it
    bus = kit.bus()
    early = bus.register("worker")
    waiting = await kit.waits(train(bus, early, 1))
    bus.restore(pickle.loads(saved))
    assert (bus.groups, bus.rows, bus.retained_rows) == (3, 9, 0)
    assert not bus.holds("open") and bus.holds("b") and not bus.holds("a")
    assert (await waiting).groups == ("b",)
    assert (await train(bus, early, 9)).groups == ("c", "d")
    again = await bus.claim("score", PLAYED, 3, "row", early)
    assert ids(again) == ["b/1/0", "b/2/0", "c/0/0"]
    assert await bus.put({row.id: {"reward": 2} for row in again.rows}, early) == 3  # early is not old, though equal
    assert bus.repeated == 1
    rewards = await bus.claim("read", frozenset({"reward"}), 9, "row", early)
    assert [row.columns["reward"] for row in rewards.rows] == [1, 1, 2, 2]
    assert (await bus.claim("values", frozenset({"value"}), 9, "group", early, "finished")).groups == ("d", "c")
    fresh = kit.bus()
    fresh.restore(pickle.loads(saved))
    new = fresh.register("worker")
    assert new.incarnation > old.incarnation
    await play(fresh, new, "z", 9, rows=1)
    await fresh.put(played("z", 1, "value"), new)
    assert (await fresh.claim("values", frozenset({"value"}), 9, "group", new, "finished")).groups == ("d", "c", "z")
    await fresh.open_group("open", 4, None, new)
    with pytest.raises(BusError, match="restore"):
        fresh.restore(pickle.loads(saved))


# --- cancellation -----------------------------------------------------------------------------------------------------


async def check_a_cancelled_claim_loses_nothing(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    first, second, third = [await kit.waits(train(bus, holder, 1)) for _ in range(3)]
    second.cancel()
    await play(bus, holder, "a", 0)
    first.cancel()  # it may have been woken for ``a`` already
    await kit.settle()
    if first.cancelled():
        assert (await third).groups == ("a",)
    else:  # the bus was quicker than the cancellation: then the claim is there
        assert first.result().groups == ("a",)
        third.cancel()


async def check_a_cancelled_put_loses_nothing(kit: Kit) -> None:
    bus = kit.bus(max_rows=2)
    holder = bus.register("x")
    await play(bus, holder, "a", 0)
    await bus.open_group("b", 1, None, holder)
    await bus.open_group("c", 2, None, holder)
    b = await kit.waits(bus.put(played("b"), holder, "b"))
    c = await kit.waits(bus.put(played("c"), holder, "c"))
    await bus.evict("a")
    await asyncio.sleep(0)  # b is about to be woken, or has been
    b.cancel()
    await kit.settle()
    if b.cancelled():
        assert c.done() and bus.rows == 2
        assert [row.id for row in bus.held_rows()] == ["c/0/0", "c/1/0"]
        await bus.evict("c")
        assert await bus.put(played("b"), holder, "b") == 2  # nothing of it was written
    else:
        assert [row.id for row in bus.held_rows()] == ["b/0/0", "b/1/0"]
        c.cancel()


# --- gauges -----------------------------------------------------------------------------------------------------------


async def check_gauges(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await bus.open_group("open", 1, None, holder)
    await play(bus, holder, "a", 0)
    await play(bus, holder, "b", 2)
    await score(bus, holder, "b")
    for by, all_ready, scored in (("group", 2, 1), ("row", 4, 2)):
        unit: Any = by
        assert bus.ready("nobody yet", PLAYED, unit) == all_ready
        assert bus.ready("nobody yet", SCORED, unit) == scored
    await train(bus, holder, 1, order="started")
    assert bus.ready("train", PLAYED) == 0  # b is blocked
    await bus.evict("open")
    assert bus.ready("train", PLAYED) == 1
    assert (bus.groups, bus.rows, bus.retained_rows, bus.late, bus.overfull) == (2, 4, 0, 0, 0)
    assert [row.id for row in bus.held_rows()] == ["a/0/0", "a/1/0", "b/0/0", "b/1/0"]


CHECKS: tuple[Check, ...] = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))
