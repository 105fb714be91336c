"""The bus's contract, first part: holders and fencing, writing, claims and acks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from relax_core.bus import Bus, BusError, Claim, Holder, merge
from relax_core.errors import FencedError
from relax_core.testing.bus_kit import PLAYED, SCORED, Check, Kit, ids, play, played, score, train

# --- holders ----------------------------------------------------------------------------------------------------------


async def check_a_dead_incarnation_is_fenced(kit: Kit) -> None:
    bus = kit.bus()
    old = bus.register("rollout")
    await play(bus, old, "a", 0)
    await bus.open_group("b", 1, None, old)
    claim = await train(bus, old, 1)
    new = bus.register("rollout")
    assert (old.name, new.name) == ("rollout", "rollout") and new.incarnation > old.incarnation
    calls: list[Coroutine[Any, Any, Any]] = [
        bus.open_group("c", 2, None, old),
        bus.put(played("b"), old, "b"),
        bus.put(played("a", column="reward"), old),
        bus.close_group("b", 0, old),
        train(bus, old, 1),
        bus.ack(claim),
        bus.ack(claim, retain=0),
    ]
    for call in calls:
        with pytest.raises(FencedError):
            await call
    assert (bus.rows, bus.groups) == (2, 2)
    assert all(set(row.columns) == {"tokens"} for row in bus.held_rows())
    assert bus.orphans() == ["b"]
    assert await bus.put(played("b"), new, "b") == 2  # another living holder may go on with the group


async def check_waits_of_the_dead_end(kit: Kit) -> None:
    bus = kit.bus(max_rows=2)
    rollout, other, busy = bus.register("rollout"), bus.register("train"), bus.register("score")
    await play(bus, rollout, "a", 0)
    await bus.open_group("b", 1, None, rollout)
    await bus.claim("score", PLAYED, 1, "group", busy)
    put = await kit.waits(bus.put(played("b"), rollout, "b"))
    claim = await kit.waits(train(bus, other, 2, exact=True))
    bus.declare_dead(rollout)
    bus.declare_dead(other)
    bus.declare_dead(other)  # once more changes nothing
    await kit.settle()
    for task in (put, claim):
        with pytest.raises(FencedError):
            await task


async def check_claims_of_the_dead_are_offered_again(kit: Kit) -> None:
    bus = kit.bus()
    rollout, first, second = bus.register("rollout"), bus.register("train-0"), bus.register("train-1")
    for serial, group in enumerate("abc"):
        await play(bus, rollout, group, serial)
    assert (await train(bus, first, 1)).groups == ("a",)
    kept = await train(bus, second, 1)
    bus.declare_dead(first)
    assert (await train(bus, second, 5)).groups == ("a", "c")  # each in its old place
    assert await bus.ack(kept) == ("b",)  # and the living keep theirs


async def check_who_waits_gets_the_claims_of_the_dead(kit: Kit) -> None:
    bus = kit.bus()
    rollout, first, second = bus.register("rollout"), bus.register("score-0"), bus.register("score-1")
    await play(bus, rollout, "a", 0, rows=3)
    claim = await bus.claim("score", PLAYED, 2, "row", first)
    assert ids(claim) == ["a/0/0", "a/1/0"] and claim.groups == ("a",)
    assert ids(await bus.claim("score", PLAYED, 2, "row", second)) == ["a/2/0"]
    waiting = await kit.waits(bus.claim("score", PLAYED, 2, "row", second))
    bus.register("score-0")
    assert ids(await waiting) == ["a/0/0", "a/1/0"]


async def check_a_slow_holder_is_not_robbed(kit: Kit) -> None:
    bus = kit.bus()
    rollout, slow, quick = bus.register("rollout"), bus.register("score-0"), bus.register("score-1")
    await play(bus, rollout, "a", 0)
    await play(bus, rollout, "b", 1)
    claim = await bus.claim("score", PLAYED, 1, "group", slow)
    assert (await bus.claim("score", PLAYED, 5, "group", quick)).groups == ("b",)
    waiting = await kit.waits(bus.claim("score", PLAYED, 1, "group", quick))
    bus.register("reward model")  # others come and go
    await kit.settle()
    assert not waiting.done()
    await score(bus, slow, "a")
    assert await bus.ack(claim) == ("a",)
    waiting.cancel()


async def check_work_of_the_dead_may_be_done_again(kit: Kit) -> None:
    """A stage that died between put and ack: its successor computes the same columns, and the first stay."""
    bus = kit.bus()
    rollout, first = bus.register("rollout"), bus.register("score")
    await play(bus, rollout, "a", 0)
    await bus.claim("score", PLAYED, 1, "group", first)
    await bus.put({"a/0/0": {"reward": 1}, "a/1/0": {"reward": 2}}, first)
    second = bus.register("score")
    claim = await bus.claim("score", PLAYED, 1, "group", second)
    assert await bus.put({"a/0/0": {"reward": 7, "more": 3}, "a/1/0": {"reward": 8}}, second) == 2
    await bus.ack(claim)
    assert [dict(row.columns) for row in (await train(bus, rollout, 1, frozenset({"reward"}))).rows] == [
        {"reward": 1},
        {"reward": 2},
    ]
    assert bus.repeated == 2
    with pytest.raises(BusError, match="more"):
        await bus.put({"a/0/0": {"more": 4}}, second)


# --- writing ----------------------------------------------------------------------------------------------------------


async def check_columns_are_write_once_and_puts_all_or_nothing(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("rollout")
    await play(bus, holder, "a", 0)
    with pytest.raises(BusError, match=r"'tokens' of row 'a/1/0'.*write-once"):
        await bus.put({"a/0/0": {"reward": 1.0}, "a/1/0": {"tokens": "others"}}, holder)
    with pytest.raises(BusError, match="'a/7/0'"):
        await bus.put({"a/0/0": {"reward": 1.0}, "a/7/0": {"reward": 1.0}}, holder)
    assert [dict(row.columns) for row in bus.held_rows()] == [{"tokens": "tokens a/0"}, {"tokens": "tokens a/1"}]
    await bus.open_group("b", 1, None, holder)
    await bus.put(played("b", 1), holder, "b")
    with pytest.raises(BusError, match="'b/0/0'"):
        await bus.put({"b/1/0": {"tokens": ""}, "b/0/0": {"tokens": ""}}, holder, "b")
    assert bus.rows == 3


async def check_misuse_is_an_error(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("rollout")
    await play(bus, holder, "a", 0)
    await bus.open_group("b", 1, None, holder)
    await bus.put(played("b", 2), holder, "b")
    misuse: list[tuple[str, Coroutine[Any, Any, Any]]] = [
        ("'nobody'", bus.put(played("nobody"), holder, "nobody")),
        ("'nobody'", bus.put(played("nobody"), holder)),
        ("'nobody'", bus.close_group("nobody", 2, holder)),
        ("'a' was opened", bus.open_group("a", 2, None, holder)),
        ("'a', which is closed", bus.put(played("a", first=2), holder, "a")),
        ("'a' with 2 rows, but it is closed", bus.close_group("a", 2, holder)),
        ("'b' with 3 rows, but it has 2", bus.close_group("b", 3, holder)),
        ("'a/5/0' of group 'b'", bus.put({"a/5/0": {"tokens": ""}}, holder, "b")),
        ("claims 0 groups", train(bus, holder, 0)),
        ("stage 'never'", bus.ack(Claim("never", holder, (), ("a",)))),
    ]
    for words, call in misuse:
        with pytest.raises(BusError, match=words):
            await call
    assert await bus.close_group("b", 2, holder)
    assert (bus.rows, bus.groups, bus.late) == (4, 2, 0)


# --- claims -----------------------------------------------------------------------------------------------------------


async def check_claimable_when_closed_and_complete(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    by_group = await kit.waits(train(bus, holder, 1, SCORED))
    by_row = await kit.waits(bus.claim("rows", SCORED, 5, "row", holder))
    await bus.open_group("a", 0, None, holder)
    await bus.put({"a/0/0": {"tokens": 1, "reward": 1}}, holder, "a")
    await bus.put({"a/1/0": {"tokens": 2}}, holder, "a")
    await kit.settle()
    assert not by_group.done() and not by_row.done()  # not closed
    await bus.close_group("a", 2, holder)
    await kit.settle()
    assert not by_group.done()  # not complete
    assert ids(await by_row) == ["a/0/0"]
    await bus.put({"a/1/0": {"other": 1}}, holder)
    await kit.settle()
    assert not by_group.done()
    await bus.put({"a/1/0": {"reward": 2}}, holder)
    claim = await by_group
    assert (claim.stage, claim.holder, claim.groups) == ("train", holder, ("a",))
    assert ids(await bus.claim("rows", SCORED, 5, "row", holder)) == ["a/1/0"]
    assert [(row.id, row.group, dict(row.columns)) for row in claim.rows] == [
        ("a/0/0", "a", {"tokens": 1, "reward": 1}),  # what it needs, and no more
        ("a/1/0", "a", {"tokens": 2, "reward": 2}),
    ]


async def check_order_any_takes_the_lowest_serial_first(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await bus.open_group("open", 0, None, holder)
    for serial, group in ((9, "j"), (3, "d"), (10, "k"), (4, "e")):
        await play(bus, holder, group, serial, rows=11)
    claim = await train(bus, holder, 3)
    assert claim.groups == ("d", "e", "j")
    assert ids(claim)[:11] == [f"d/{m}/0" for m in range(11)]  # as put, not as text
    rows = await bus.claim("rows", PLAYED, 12, "row", holder)
    assert ids(rows) == [*(f"d/{m}/0" for m in range(11)), "e/0/0"] and rows.groups == ("d", "e")


async def check_order_started_waits_for_the_first(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    for serial, group in enumerate("abcd"):
        await bus.open_group(group, serial, None, holder)
    for group in "bd":
        await bus.put(played(group), holder, group)
        await bus.close_group(group, 2, holder)
    claim = await kit.waits(train(bus, holder, 4, order="started"))
    await bus.put(played("a"), holder, "a")
    await bus.close_group("a", 2, holder)
    assert (await claim).groups == ("a", "b")  # c is open and blocks d
    claim = await kit.waits(train(bus, holder, 4, order="started"))
    await bus.evict("c")
    assert (await claim).groups == ("d",)


async def check_order_started_waits_for_columns_too(kit: Kit) -> None:
    for by, first, rest in (("group", ["a/0/0", "a/1/0"], []), ("row", ["a/0/0"], ["a/1/0"])):
        bus = kit.bus()
        holder = bus.register("x")
        await play(bus, holder, "a", 0)
        await play(bus, holder, "b", 1)
        await score(bus, holder, "b")

        async def claim(bus: Bus = bus, holder: Holder = holder, by: Any = by) -> Claim:
            return await bus.claim("train", SCORED, 9, by, holder, "started")

        waiting = await kit.waits(claim())
        if by == "row":
            await bus.put({"a/1/0": {"reward": 1}}, holder)
            await kit.settle()
            assert not waiting.done()
            await bus.put({"a/0/0": {"reward": 1}}, holder)
            assert ids(await waiting) == ["a/0/0", "a/1/0", "b/0/0", "b/1/0"]
        else:
            await bus.put({"a/0/0": {"reward": 1}}, holder)
            await kit.settle()
            assert not waiting.done()
            await bus.put({"a/1/0": {"reward": 1}}, holder)
            assert ids(await waiting) == [*first, *rest, "b/0/0", "b/1/0"]


async def check_order_finished_follows_completion(kit: Kit) -> None:
    """Also for a stage that comes later than the groups, and after a claim was offered again."""
    bus = kit.bus()
    holder, dead = bus.register("x"), bus.register("y")
    for serial, group in enumerate("abcd"):
        await play(bus, holder, group, serial)
    for group in "cadb":
        await score(bus, holder, group)
    claim = await train(bus, dead, 2, SCORED, order="finished")
    assert claim.groups == ("c", "a")
    bus.declare_dead(dead)
    assert (await train(bus, holder, 3, SCORED, order="finished")).groups == ("c", "a", "d")
    await play(bus, holder, "e", 4)
    await play(bus, holder, "f", 5)
    await score(bus, holder, "f")
    await score(bus, holder, "e")
    assert (await train(bus, holder, 3, SCORED, order="finished")).groups == ("b", "f", "e")
    rows = await bus.claim("rows", SCORED, 4, "row", holder, "finished")
    assert ids(rows) == ["c/0/0", "c/1/0", "a/0/0", "a/1/0"]
    for serial, group in ((6, "g"), (7, "h")):
        await bus.open_group(group, serial, None, holder)
        await bus.put({f"{group}/0/0": {"tokens": 1, "reward": 1}}, holder, group)
    await bus.close_group("h", 1, holder)
    await bus.close_group("g", 1, holder)
    assert (await train(bus, holder, 3, SCORED, order="finished")).groups == ("h", "g")
    rows = await bus.claim("rows", SCORED, 99, "row", holder, "finished")
    assert ids(rows)[-2:] == ["h/0/0", "g/0/0"]


async def check_exact_claims_wait_in_turn(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await play(bus, holder, "a", 0)
    exact = await kit.waits(train(bus, holder, 3, exact=True))
    later = await kit.waits(train(bus, holder, 3))
    await play(bus, holder, "b", 1)
    await kit.settle()
    assert not exact.done() and not later.done()
    await play(bus, holder, "c", 2)
    await play(bus, holder, "d", 3)
    assert (await exact).groups == ("a", "b", "c")
    assert (await later).groups == ("d",)


async def check_stages_are_independent(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await play(bus, holder, "a", 0)
    first = await bus.claim("score", PLAYED, 1, "group", holder)
    second = await bus.claim("reference", PLAYED, 1, "row", holder)
    third = await bus.claim("teacher", PLAYED, 9, "row", holder)
    assert (ids(first), ids(second), ids(third)) == (["a/0/0", "a/1/0"], ["a/0/0"], ["a/0/0", "a/1/0"])
    await bus.ack(first)
    assert ids(await bus.claim("reference", PLAYED, 1, "row", holder)) == ["a/1/0"]
    again = await kit.waits(bus.claim("score", PLAYED, 1, "group", holder))  # acked: never again
    again.cancel()
    assert await bus.ack(second) == ("a",) and await bus.ack(third) == ("a",)


async def check_a_stage_keeps_to_one_way(kit: Kit) -> None:
    bus = kit.bus()
    holder = bus.register("x")
    await play(bus, holder, "a", 0)
    await train(bus, holder, 1)
    for call in (
        train(bus, holder, 1, SCORED),
        train(bus, holder, 1, order="started"),
        bus.claim("train", PLAYED, 1, "row", holder),
    ):
        with pytest.raises(BusError, match="keeps to one way"):
            await call


async def check_acks_may_be_parts_or_merged(kit: Kit) -> None:
    bus = kit.bus()
    holder, other = bus.register("x"), bus.register("y")
    for serial, group in enumerate("abcd"):
        await play(bus, holder, group, serial)
    one, two, three = [await train(bus, holder, 1) for _ in range(3)]
    with pytest.raises(BusError, match="'d'"):
        await bus.ack(merge([one, Claim("train", holder, (), ("d",))]))
    with pytest.raises(BusError, match="'y' acks 'a'"):
        await bus.ack(Claim("train", other, (), ("a",)))
    assert await bus.ack(merge([three, one])) == ("c", "a")
    with pytest.raises(BusError, match="'a'"):
        await bus.ack(one)  # only once
    assert await bus.ack(two) == ("b",)
    rows = await bus.claim("score", PLAYED, 3, "row", holder)
    assert await bus.ack(Claim("score", holder, rows.rows[1:], ())) == ("a", "b")
    bus.declare_dead(holder)
    assert ids(await bus.claim("score", PLAYED, 9, "row", other))[:2] == ["a/0/0", "b/1/0"]
    with pytest.raises(BusError):
        merge([])


CHECKS: tuple[Check, ...] = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))
