"""Checks of an engine's weights: versions, what an interrupt does to running requests, refusals, sleep.

Running requests are greedy: which weights drew a token shows in whether it is their most likely one, with their
log-prob.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.errors import WeightsError
from relax_core.interfaces import Completion, Request
from relax_core.types import Encoded, Stop, Version

if TYPE_CHECKING:
    from relax_core.testing.engine_kit import Kit, Weights
    from relax_core.weights import WeightUpdate

CHANCE = 8
"""Tokens at the start of new weights that may, by chance, be the old ones' most likely ones too, about as likely."""


async def check_versions(kit: Kit) -> None:
    """Weights and version move together, also back to weights that were there before."""
    for name in ("a", "b", "a", "first"):
        await kit.load(kit.weights(name))
        requests = [kit.request(0, 12), kit.request(1, 12, 1.0)]
        for request, completion in zip(requests, await kit.ask(*requests), strict=True):
            kit.agrees(request, completion)


async def check_frozen(kit: Kit) -> None:
    """Tensors that training cannot change come in a publication of their own (``WeightUpdate.base``), once for many."""
    a, b = kit.weights("a"), kit.weights("b")
    frozen = frozenset(name for name, _ in a.named[::2])
    await kit.load(b)
    for weights, still in ((a, frozen), (kit.mixed(a, b, frozen), frozen), (b, frozenset[str]()), (a, frozen)):
        await kit.load(weights, frozen=still)
        await _newest(kit)


async def check_continue(kit: Kit) -> None:
    """Running requests go on under new weights; versions are never newer than the weights that drew the token."""
    old, new = kit.weights("a", "never"), kit.weights("b", "never")
    await kit.load(old)
    before, running = kit.version, await kit.running(2)
    await kit.load(new, "continue")
    for request, task in running:
        completion = await kit.within(task, "a request under new weights (continue)")
        kit.whole(request, completion)
        _full_length(kit, completion, "continue")
        _moved(kit, request, completion, old, before)
    await _newest(kit)


def _moved(kit: Kit, request: Request, c: Completion, old: Weights, before: Version) -> None:
    """From old to new weights in the middle of a reply."""
    by_old = min(kit.greedy_until(request, c, old), kit.equal_until(request, c, old))
    assert by_old < len(c.ids), (
        f"continue: all {len(c.ids)} tokens of a running request were drawn by the old weights, though load_weights "
        "had returned before it ended: running requests go on with the new ones (raise long if it had ended)"
    )
    known = {before, kit.version}
    assert set(c.versions) <= known, f"continue: versions {sorted(set(c.versions))}, there were {sorted(known)}"
    assert c.versions == sorted(c.versions), "continue: a token's version is older than that of one before"
    late = c.versions.count(kit.version)
    drawn = len(c.ids) - by_old
    assert late <= drawn + CHANCE, (
        f"continue: {late} tokens say version {tuple(kit.version)}, but only the last {drawn} were drawn by it: a "
        "version is a lower bound, never newer than the weights"
    )
    if kit.engine.exact_versions:
        assert late >= drawn, f"continue: {drawn} tokens were drawn by the new weights, {late} say so (exact_versions)"


def _full_length(kit: Kit, c: Completion, how: str) -> None:
    assert c.stop is Stop.LENGTH and len(c.ids) == kit.long, (
        f"{how}: a running request ended by {c.stop} with {len(c.ids)} of {kit.long} tokens; it goes on to its limit"
    )


async def check_abort(kit: Kit) -> None:
    """Running requests come back with what they have, of the old weights; continued, they go on under the new ones."""
    old = kit.weights("a", "never")
    await kit.load(old)
    before, running = kit.version, await kit.running(2)
    await kit.load(kit.weights("b", "never"), "abort")
    for request, task in running:
        c = await kit.within(task, "a running request (abort)")
        assert c.stop is Stop.ABORT, (
            f"abort: a running request ended by {c.stop} with {len(c.ids)} of {kit.long} tokens"
        )
        assert len(c.ids) < kit.long, f"abort: it came back with all of its {kit.long} tokens"
        kit.agrees(request, c, old)
        assert set(c.versions) <= {before}, f"abort: versions {sorted(set(c.versions))}, the old weights are {before}"
        prompt = Encoded([*request.prompt.ids, *c.ids])
        rest = replace(request, id=f"{request.id}-more", prompt=prompt, drawn=len(c.ids))
        (more,) = await kit.ask(rest)
        kit.agrees(rest, more)
        assert len(c.ids) + len(more.ids) == kit.long, (
            f"abort: {len(c.ids)} tokens, continued by {len(more.ids)}: {kit.long} together were asked for"
        )
    await _newest(kit)


async def check_drain(kit: Kit) -> None:
    """Running requests finish under the old weights; those that come meanwhile wait for the new ones."""
    old, new = kit.weights("a", "never"), kit.weights("b", "never")
    await kit.load(old)
    before, running = kit.version, await kit.running(2)
    loading = asyncio.create_task(kit.load(new, "drain"))
    await asyncio.sleep(0)
    late = kit.request(9, 6)
    waiting = asyncio.create_task(kit.engine.generate(late))
    for request, task in running:
        c = await kit.within(task, "a running request (drain)")
        _full_length(kit, c, "drain")
        kit.agrees(request, c, old)
        assert set(c.versions) == {before}, f"drain: versions {sorted(set(c.versions))}, the old weights are {before}"
    await loading
    kit.agrees(late, await kit.within(waiting, "a request that came while load_weights drained"))
    await _newest(kit)


async def check_refused(kit: Kit) -> None:
    """Weights that are not as published raise WeightsError; the old ones serve on, and good ones are taken later."""
    old = kit.weights("a", "never")
    await kit.load(old)
    before, running = kit.version, await kit.running(1)
    for what, bad in _bad(kit):
        try:
            await kit.within(kit.engine.load_weights(bad), f"load_weights of {what}")
        except WeightsError:
            pass
        else:
            raise AssertionError(f"load_weights took {what}; it must verify first, and raise WeightsError")
        version = (await kit.engine.health())["version"]
        assert version == before.number, f"after {what} was refused the version is {version:g}, not {before.number}"
    kit.version = before
    await _newest(kit)
    for request, task in running:
        kit.agrees(request, await kit.within(task, "a request while weights were refused"))
    kit.version = Version(0, before.number + 10)
    await kit.load(kit.weights("b"))
    await _newest(kit)


def _bad(kit: Kit) -> list[tuple[str, WeightUpdate]]:
    update = kit.published(kit.weights("b").named)
    first, *others = update.manifest.tensors
    assert first.checksum is not None
    wrong = {
        "a tensor with a wrong checksum": first._replace(checksum=first.checksum ^ 1),
        "a tensor that the model does not have": first._replace(name="no.such.weight"),
    }
    return [
        (what, replace(update, manifest=replace(update.manifest, tensors=(info, *others))))
        for what, info in wrong.items()
    ]


async def check_sleep(kit: Kit) -> None:
    """Asleep it gives running requests back and keeps new ones; awake and with weights it serves."""
    if "sleep" in kit.lacks:
        return
    weights = kit.weights("a", "never")
    await kit.load(weights)
    running = await kit.running(2)
    await kit.within(kit.engine.sleep(), "sleep()")
    for request, task in running:
        c = await kit.within(task, "a running request (sleep)")
        assert c.stop is Stop.ABORT, (
            f"sleep: a running request ended by {c.stop} with {len(c.ids)} of {kit.long} tokens"
        )
        kit.agrees(request, c, weights)
    late = kit.request(9, 6)
    waiting = asyncio.create_task(kit.engine.generate(late))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "sleep: a request was answered by a sleeping engine"
    await kit.within(kit.engine.wake(), "wake()")
    await kit.load(weights)
    kit.agrees(late, await kit.within(waiting, "a request that came while the engine slept"), weights)
    await _newest(kit)


async def _newest(kit: Kit) -> None:
    """A request that comes after load_weights is of the new weights alone."""
    requests = [kit.request(1, 8), kit.request(2, 8, 1.0)]
    for request, completion in zip(requests, await kit.ask(*requests), strict=True):
        kit.agrees(request, completion)
