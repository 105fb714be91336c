"""Checks that every engine must pass, whatever it runs on. In a plugin's tests, all there is to write::

    def test_mine() -> None:
        check_engine(lambda setup: Mine(Mine.Config(), setup))

They ask a started engine for replies under weights that they publish, and compare with the same model in memory.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from relax_core.errors import EngineError
from relax_core.interfaces import Completion, Engine, ModelAdapter
from relax_core.setup import EngineSetup
from relax_core.testing.engine_kit import Kit
from relax_core.testing.engine_weights import (
    check_abort,
    check_continue,
    check_drain,
    check_frozen,
    check_refused,
    check_sleep,
    check_versions,
)
from relax_core.types import Stop

ABILITIES = frozenset({"pause", "sleep", "media"})
"""What an engine may lack, and say so: ``pause``, ``resume``; ``sleep``, ``wake``; media that the adapter reads."""

Kill = Callable[[Any], "Awaitable[None] | None"]


def check_engine(
    make: Callable[[EngineSetup], Engine],
    *,
    adapter: ModelAdapter | None = None,
    kill: Kill | None = None,
    dtype: str = "float32",
    lacks: Iterable[str] = (),
    limit_s: float = 60.0,
    long: int = 256,
) -> None:
    """Raise AssertionError, saying what is wrong, unless the engine keeps the promises of ``Engine``.

    ``make`` gives a fresh engine, not started, of the adapter's model (default: a tiny random one, see ``tiny``).
    ``kill`` ends what a started engine runs on as a crash would; without it, death is not checked. ``dtype``: in which
    it computes, and gets weights; it sets the tolerance. ``lacks``: of ``ABILITIES``. ``limit_s``: for whatever is
    waited for. ``long``: new tokens of replies that are interrupted; they must take longer than loading weights.
    """
    if unknown := sorted(set(lacks) - ABILITIES):
        raise ValueError(f"lacks: {unknown} are no abilities; those are {sorted(ABILITIES)}")
    from relax_core.testing.tiny import tiny_adapter

    adapter = adapter or tiny_adapter()
    engine = make(EngineSetup(adapter, 0, deterministic=False))
    kit = Kit(engine, adapter, dtype, frozenset(lacks), limit_s, long)
    try:
        asyncio.run(_run(kit, kill))
    finally:
        kit.transport.close()


async def _run(kit: Kit, kill: Kill | None) -> None:
    try:
        await kit.within(kit.engine.start(), "start()")
        for check in CHECKS:
            await _named(kit, check(kit), check.__name__)
        if kill is not None:
            await _named(kit, check_death(kit, kill), "check_death")
    finally:
        await kit.within(kit.engine.stop(), "stop()")


async def _named(kit: Kit, work: Awaitable[None], name: str) -> None:
    try:
        await work
        kit.mean()
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error
    except EngineError as error:
        raise AssertionError(f"{name}: the engine raised EngineError: {error}") from error


# --- replies ----------------------------------------------------------------------------------------------------------


async def check_greedy(kit: Kit) -> None:
    """Greedy replies are the most likely ids that are not banned; their log-probs are those at temperature 1."""
    await kit.load(kit.weights("a"))
    requests = [kit.request(i, 16) for i in range(6)]
    for request, completion in zip(requests, await kit.ask(*requests), strict=True):
        kit.agrees(request, completion)


async def check_logprobs(kit: Kit) -> None:
    """Log-probs of sampled ids are the banned, tempered log-softmax, at every temperature."""
    await kit.load(kit.weights("a"))
    for temperature in (1.0, 0.7, 1.5):
        requests = [kit.request(i, 16, temperature) for i in range(6)]
        for request, completion in zip(requests, await kit.ask(*requests), strict=True):
            kit.agrees(request, completion)


async def check_bans(kit: Kit) -> None:
    """Under blank weights all ids that are not banned are equally likely, and no other is drawn."""
    import math

    from relax_core.probe import BLANK
    from relax_core.weights import blank

    update = kit.published(list(blank(kit.weights("a").named)))
    await kit.within(kit.engine.load_weights(update), "load_weights (blank)")
    requests = [kit.request(i, 24, 1.0) for i in range(32)]
    allowed = kit.adapter.vocab_size - len(set(kit.adapter.banned_token_ids))
    for request, completion in zip(requests, await kit.ask(*requests), strict=True):
        kit.whole(request, completion)
        for token, logprob in zip(completion.ids, completion.logprobs, strict=True):
            assert abs(logprob + math.log(allowed)) <= BLANK, (
                f"blank weights: id {token} has log-prob {logprob:.6f}, but {allowed} of {kit.adapter.vocab_size} "
                f"ids are allowed and equally likely: {-math.log(allowed):.6f}"
            )


async def check_limits(kit: Kit) -> None:
    """A reply ends with a stop id (EOS) or at its limit (LENGTH); a continued prefix counts."""
    await kit.load(kit.weights("stops", "often"))
    requests = [kit.request(i, 1 + i % 12, 1.0) for i in range(48)]
    replies = await kit.ask(*requests)
    for request, completion in zip(requests, replies, strict=True):
        kit.agrees(request, completion)
    stops = {completion.stop.value for completion in replies}
    assert stops == {"eos", "length"}, (
        f"48 replies, of which many meet a stop id, and many their limit, ended by {stops}"
    )

    await kit.load(kit.weights("a", "never"))
    whole = kit.request(0, 12)
    (first,) = await kit.ask(whole)
    rest = kit.request(0, 12, prompt=_after(whole, first.ids[:5]), drawn=5)
    (last,) = await kit.ask(rest)
    kit.agrees(rest, last)
    assert len(last.ids) == 7, f"5 of 12 tokens were drawn before (drawn=5), so 7 are left: {len(last.ids)} came"


def _after(request: Any, ids: list[int]) -> Any:
    from relax_core.types import Encoded

    return Encoded([*request.prompt.ids, *ids])


async def check_concurrency(kit: Kit) -> None:
    """Many requests of mixed lengths at once, of both pools: each gets its own reply."""
    await kit.load(kit.weights("a"))
    requests = [
        kit.request(i, 1 + i * 7 % 32, (0.0, 1.0, 0.7)[i % 3], pool="eval" if i % 5 == 0 else "train")
        for i in range(64)
    ]
    for request, completion in zip(requests, await kit.ask(*requests), strict=True):
        kit.agrees(request, completion)


async def check_cancel(kit: Kit) -> None:
    """A cancelled request leaves; the others go on, and so does the engine."""
    await kit.load(kit.weights("a", "never"))
    (_, first), *others = await kit.running(3)
    first.cancel()
    await kit.gauges(lambda g: g["running"] + g["waiting"] < 3, "that a cancelled request is gone")
    await asyncio.sleep(0.01)  # replies that ended with it arrive
    ended = sum(task.done() for _, task in others)
    assert not ended, f"a cancelled request was at work until {ended} of 2 others had ended; it must leave at once"
    for request, task in others:
        kit.agrees(request, await kit.within(task, "a request beside a cancelled one"))
    await kit.gauges(lambda g: not g["running"] and not g["waiting"], "nothing at work after a cancelled request")
    assert first.cancelled(), "a cancelled generate() must raise CancelledError"


async def check_media(kit: Kit) -> None:
    """What a medium shows changes the log-probs, as it does in the model in memory."""
    if "media" in kit.lacks or "image" not in kit.adapter.kinds:
        return
    from relax_core.testing.noise import picture
    from relax_core.types import message

    await kit.load(kit.weights("a"))
    with kit.adapter.media.holding():
        prompts = [kit.adapter.encode([message("user", picture(seed=i), "w00 w01")]) for i in range(4)]
        kit.adapter.media.retain(ref.key for prompt in prompts for ref in prompt.media)
    requests = [kit.request(i, 12, 1.0, prompt) for i, prompt in enumerate(prompts)]
    for request, completion in zip(requests, await kit.ask(*requests), strict=True):
        kit.agrees(request, completion)


# --- pauses and gauges ------------------------------------------------------------------------------------------------


async def check_gauges(kit: Kit) -> None:
    """``running``, ``waiting`` and ``version`` of health()."""
    await kit.load(kit.weights("a", "never"))
    tasks = await kit.running(3)
    gauges = await kit.engine.health()
    done = sum(task.done() for _, task in tasks)
    at_work = gauges["running"] + gauges["waiting"]
    assert at_work >= 3 - done, f"3 requests, of which {done} are done: running and waiting are {at_work:g} together"
    await kit.within(asyncio.gather(*(task for _, task in tasks)), "3 requests")
    await kit.gauges(lambda g: not g["running"] and not g["waiting"], "nothing at work when all is done")
    version = (await kit.engine.health())["version"]
    assert version == kit.version.number, f"version is {version:g}, loaded was {kit.version.number}"


async def check_pause(kit: Kit) -> None:
    """Nothing is decoded between pause() and resume(); requests may come, and all go on where they were."""
    if "pause" in kit.lacks:
        return
    await kit.load(kit.weights("a", "never"))
    tasks = await kit.running(2)
    await kit.within(kit.engine.pause(), "pause()")
    late = kit.request(9, 4)
    tasks.append((late, asyncio.create_task(kit.engine.generate(late))))
    await asyncio.sleep(0.3)
    done = [task for _, task in tasks if task.done()]
    assert tasks[-1][1] not in done, "a request that came while the engine was paused was answered before resume()"
    assert not done, f"{len(done)} of 2 running requests ended while the engine was paused; raise long, or fix pause()"
    await kit.within(kit.engine.resume(), "resume()")
    for request, task in tasks:
        kit.agrees(request, await kit.within(task, "a request that was paused"))


# --- life and death ---------------------------------------------------------------------------------------------------


async def check_stop(kit: Kit) -> None:
    """stop() fails what waits; start() serves again with the first weights, and takes new ones."""
    await kit.load(kit.weights("a", "never"))
    tasks = [task for _, task in await kit.running(3)]
    await kit.within(kit.engine.stop(), "stop() with 3 requests at work")
    await _all_lost(kit, tasks, "stopped")
    await _refuses(kit, "stopped")
    await _serves_again(kit)


async def check_death(kit: Kit, kill: Kill) -> None:
    """All requests in flight get EngineError, ``died`` tells, and ``start`` serves again."""
    await kit.load(kit.weights("a", "never"))
    tasks = [task for _, task in await kit.running(8)]
    watching = asyncio.create_task(kit.engine.died())
    killed = kill(kit.engine)
    if inspect.isawaitable(killed):
        await killed
    await _all_lost(kit, tasks, "killed")
    reason = await kit.within(watching, "died() of a killed engine")
    assert isinstance(reason, str) and reason, f"died() gives {reason!r}; it says why, in a line"
    await _refuses(kit, "killed")
    await _serves_again(kit)


async def _all_lost(kit: Kit, tasks: list[asyncio.Task[Any]], how: str) -> None:
    work = asyncio.gather(*tasks, return_exceptions=True)
    results = await kit.within(work, f"requests in flight when the engine was {how}")
    lost = [result for result in results if isinstance(result, EngineError)]
    early = [r for r in results if isinstance(r, Completion) and r.stop is Stop.LENGTH and len(r.ids) == kit.long]
    others = [_brief(result) for result in results if result not in lost and result not in early]
    assert not others, (
        f"{len(others)} of {len(tasks)} requests in flight when it was {how} got no EngineError: {others[0]}"
    )
    assert lost, f"all requests had ended before it was {how}: raise long"


def _brief(result: object) -> str:
    return f"{len(result.ids)} tokens, {result.stop}" if isinstance(result, Completion) else repr(result)


async def _refuses(kit: Kit, how: str) -> None:
    for name, call in (("health()", kit.engine.health()), ("generate()", kit.engine.generate(kit.request(0, 1)))):
        try:
            await kit.within(call, f"{name} of an engine that was {how}")
        except EngineError:
            continue
        raise AssertionError(f"{name} of an engine that was {how} must raise EngineError")


async def _serves_again(kit: Kit) -> None:
    await kit.within(kit.engine.start(), "start() again")
    request = kit.request(1, 8, 1.0)
    (completion,) = await kit.ask(request)
    kit.agrees(request, completion, kit.weights("first"))
    await kit.load(kit.weights("b"))
    (completion,) = await kit.ask(request)
    kit.agrees(request, completion)


CHECKS: tuple[Callable[[Kit], Awaitable[None]], ...] = (
    check_greedy,
    check_logprobs,
    check_bans,
    check_limits,
    check_versions,
    check_frozen,
    check_concurrency,
    check_media,
    check_cancel,
    check_gauges,
    check_pause,
    check_continue,
    check_abort,
    check_drain,
    check_refused,
    check_sleep,
    check_stop,
)
"""In this order, on one engine."""
