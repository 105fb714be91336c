"""The embedded engine on an event loop: determinism, pools, pauses, life and death."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relax_core.errors import EngineError
from relax_core.interfaces import Completion
from relax_core.setup import EngineSetup
from relax_core.testing.engines import (
    decoder_of,
    engine,
    pending,
    request,
    serving,
    until,
    update,
    watched,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.torch.config import EngineConfig
from relax_core.torch.engine import TorchEngine
from relax_core.torch.plain import full_logprobs
from relax_core.types import Encoded, Sampling, Stop, Version

OLD, NEW = Version(0, 0), Version(0, 1)

# --- determinism ----------------------------------------------------------------------------------------------------


async def play(e: TorchEngine, member: int, rng: random.Random) -> list[Completion]:
    """Three turns with thinking between; entered by the caller."""
    ids, done = [3 + member % 7, 5], []
    try:
        for turn in range(3):
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
            await asyncio.sleep(rng.random() * 0.004)
            r = request(f"{member}", ids, 2 + (member * 5 + turn * 3) % 6, order=(member, turn))
            r = replace(r, key=r.key._replace(turn=turn))
            c = await e.generate(r)
            done.append(c)
            ids = [*ids, *c.ids, 9]
    finally:
        e.leave("train")
    return done


async def plays(deterministic: bool, delays: int) -> tuple[list[list[Completion]], list[int]]:
    e = engine(deterministic, max_rows=6)
    await e.start()
    rng = random.Random(delays)
    members = list(range(9))
    for _ in members:
        e.enter("train")
    rng.shuffle(members)
    tasks = {m: asyncio.create_task(play(e, m, random.Random(rng.random()))) for m in members}
    played = [await tasks[m] for m in sorted(members)]
    await e.stop()
    return played, watched(e).sizes


def test_randomly_delayed_submitters_get_the_same_bits_in_deterministic_mode() -> None:
    played, sizes = asyncio.run(plays(True, 0))
    for delays in (1, 2):
        again, same = asyncio.run(plays(True, delays))
        assert again == played
        assert same == sizes
    loose, other = asyncio.run(plays(False, 1))
    assert other != sizes  # else the delays would prove nothing
    for ours, theirs in zip(played, loose, strict=True):
        assert [c.ids for c in ours] == [c.ids for c in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_other_pool_is_not_waited_for() -> None:
    async def test(e: TorchEngine) -> None:
        e.enter("train")  # at work for ever
        assert len((await e.generate(request("e", [3], 4, pool="eval"))).ids) == 4
        (waiting,) = pending(e, [request("t", [3], 4)])
        assert len((await waiting).ids) == 4  # it is the entered party that waits now
        e.enter("train")
        (waiting,) = pending(e, [request("t", [3], 4)])
        await asyncio.sleep(0.02)
        assert not waiting.done()
        e.leave("train")
        await waiting

    serving(test, deterministic=True)


def test_pools_take_turns() -> None:
    async def test(e: TorchEngine) -> None:
        train, other = pending(e, [request("t", [3], 20), request("e", [4], 10, pool="eval")])
        await other
        assert not train.done()
        await train

    serving(test)


# --- pauses, cancellation -------------------------------------------------------------------------------------------


def test_pause_holds_everything_and_resume_goes_on_where_it_was() -> None:
    async def test(e: TorchEngine) -> None:
        expected = await e.generate(request("a", [3, 4], 12))
        (running,) = pending(e, [request("a", [3, 4], 12)])
        await until(lambda: decoder_of(e).running("train") == 1)
        await e.pause()
        drawn = decoder_of(e).drawn
        await asyncio.sleep(0.02)
        assert decoder_of(e).drawn == drawn
        assert not running.done()
        await e.resume()
        assert await running == expected

    serving(test)


def test_sleep_gives_running_requests_back_frees_the_cache_and_keeps_waiting_ones_until_wake() -> None:
    async def test(e: TorchEngine) -> None:
        running, waiting = pending(e, [request("a", [3, 4], 12), request("b", [5], 6)])
        await until(lambda: decoder_of(e).running("train") == 1)
        assert (await e.health())["cache_bytes"] > 0
        await e.sleep()
        assert (await running).stop is Stop.ABORT
        assert (await e.health())["cache_bytes"] == 0
        await e.load_weights(update(e))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await e.wake()
        assert set((await waiting).versions) == {NEW}

    serving(test, max_rows=1)


def test_a_cancelled_generate_frees_its_row_and_its_party() -> None:
    async def test(e: TorchEngine) -> None:
        for _ in range(2):
            e.enter("train")
        first, second = pending(e, [request("a", [3, 4], 400), request("b", [5], 5)])
        await until(lambda: decoder_of(e).running("train") == 2)
        first.cancel()
        e.leave("train")
        assert len((await second).ids) == 5
        health = await e.health()
        assert health["running"] == health["waiting"] == 0
        with pytest.raises(asyncio.CancelledError):
            await first

    serving(test, deterministic=True)


# --- life and death -------------------------------------------------------------------------------------------------


def test_gauges() -> None:
    async def test(e: TorchEngine) -> None:
        tasks = pending(e, [request(f"{i}", [3, 4], 5) for i in range(5)])
        await until(lambda: decoder_of(e).running("train") == 2)
        health = await e.health()
        assert (health["running"], health["waiting"], health["version"]) == (2, 3, 0)
        await asyncio.gather(*tasks)
        health = await e.health()
        assert (health["running"], health["waiting"], health["drawn_tokens"]) == (0, 0, 25)

    serving(test, max_rows=2)


def test_stop_fails_what_waits_and_start_serves_again() -> None:
    async def test(e: TorchEngine) -> None:
        expected = await e.generate(request("a", [3, 4], 8))
        (lost,) = pending(e, [request("b", [3, 4], 400)])
        await until(lambda: decoder_of(e).running("train") == 1)
        await e.stop()
        with pytest.raises(EngineError, match="request lost: it was stopped"):
            await lost
        for refused in (e.generate(request("a", [3], 1)), e.health()):
            with pytest.raises(EngineError, match="it was stopped; start it again"):
                await refused
        await e.start()
        assert await e.generate(request("a", [3, 4], 8)) == expected

    serving(test)


def test_an_engine_that_was_not_started_says_so() -> None:
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(engine().generate(request("a", [3], 1)))


async def broken(e: TorchEngine) -> None:
    """A request whose model fails in the middle."""
    (running,) = pending(e, [request("a", [3, 4], 50)])
    await until(lambda: decoder_of(e).running("train") == 1)
    watched(e).fails = True
    with pytest.raises(EngineError, match="request 'a': the model failed: RuntimeError: broken kernel"):
        await running
    watched(e).fails = False


def test_a_model_that_fails_now_and_then_goes_on_serving() -> None:
    async def test(e: TorchEngine) -> None:
        for _ in range(4):
            await broken(e)
            assert len((await e.generate(request("a", [3], 2))).ids) == 2
            await e.health()

    serving(test)


def test_a_model_that_fails_again_and_again_makes_the_engine_dead() -> None:
    async def test(e: TorchEngine) -> None:
        class DecodeFails(list[int]):
            def append(self, rows: int) -> None:
                super().append(rows)
                watched(e).fails = len(self) % 2 == 0  # reading the prompt works, the step after it does not

        watched(e).sizes = DecodeFails()
        for _ in range(2):
            with pytest.raises(EngineError, match="broken kernel"):
                await e.generate(request("a", [3, 4], 50))
            await e.health()
        with pytest.raises(EngineError, match="broken kernel"):
            await e.generate(request("a", [3, 4], 50))
        for call in (e.health(), e.generate(request("a", [3], 2))):
            with pytest.raises(EngineError, match=r"the model failed 3 times in a row.*broken kernel"):
                await call

    serving(test)


def test_a_prompt_too_long_is_an_error_of_that_request() -> None:
    async def test(e: TorchEngine) -> None:
        (good,) = pending(e, [request("a", [3, 4], 8)])
        with pytest.raises(EngineError, match=r"request 'long'.*512 of the model's positions"):
            await e.generate(request("long", [3] * 510, 8))
        assert len((await good).ids) == 8

    serving(test)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named() -> None:
    e = TorchEngine(EngineConfig(device="cuda"), EngineSetup(tiny_adapter(), 0, False))
    with pytest.raises(EngineError, match=r"engine\.device: 'cuda', but torch sees no GPU"):
        asyncio.run(e.start())


@pytest.mark.parametrize(("room", "lines"), [(None, 0), (257, 0), (256, 1)])
def test_a_cache_in_which_no_reply_fits_is_refused_before_the_run(room: int | None, lines: int) -> None:
    run: Any = SimpleNamespace(sampling=Sampling(max_new_tokens=256))
    assert len(list(TorchEngine.check(EngineConfig(max_cache_tokens=room), run))) == lines


def test_bfloat16_on_a_cpu_samples_from_what_it_computes() -> None:
    async def test(e: TorchEngine) -> None:
        r = request("a", [3, 4, 5], 10)
        c = await e.generate(r)
        model = decoder_of(e).model
        assert next(model.parameters()).dtype is torch.bfloat16
        expected = full_logprobs(e.setup.adapter, model, Encoded([3, 4, 5]), c.ids)
        assert c.logprobs == pytest.approx(expected, abs=0.15)

    serving(test, dtype="bfloat16")
