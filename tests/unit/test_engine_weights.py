"""New weights in a running engine: continue, abort, drain, and weights that are refused."""

import asyncio
from dataclasses import replace

import pytest

from relax_core.errors import WeightsError
from relax_core.interfaces import Completion, Interrupt
from relax_core.testing.engines import (
    decoder_of,
    pending,
    request,
    serving,
    until,
    update,
)
from relax_core.torch.engine import TorchEngine
from relax_core.torch.plain import full_logprobs
from relax_core.types import Stop, Version

OLD, NEW = Version(0, 0), Version(0, 1)

# --- weights --------------------------------------------------------------------------------------------------------


LONG = (60, 70)
"""Tokens of the rows that are interrupted: so many that they have not ended when the weights are there."""


async def halfway(e: TorchEngine, interrupt: Interrupt) -> tuple[list[Completion], Completion]:
    """Two rows are interrupted after some tokens while a third request waits; what they and it became."""
    running = pending(e, [request("a", [3, 4], LONG[0]), request("b", [5], LONG[1])])
    await until(lambda: decoder_of(e).running("train") == 2 and decoder_of(e).drawn >= 6)
    (waiting,) = pending(e, [request("c", [6, 7], 5)])
    await asyncio.sleep(0)
    await e.load_weights(update(e), interrupt)
    return [await r for r in running], await waiting


def test_continue_goes_on_with_the_new_weights_and_says_so_per_token() -> None:
    async def test(e: TorchEngine) -> None:
        running, late = await halfway(e, "continue")
        for c, n in zip(running, LONG, strict=True):
            assert c.stop is Stop.LENGTH
            assert len(c.ids) == n
            assert c.versions == sorted(c.versions)
            assert set(c.versions) == {OLD, NEW}
        assert set(late.versions) == {NEW}
        assert e.exact_versions

    serving(test, max_rows=2)


def test_abort_gives_back_prefixes_and_a_continued_turn_goes_on_under_its_key() -> None:
    async def test(e: TorchEngine) -> None:
        running, late = await halfway(e, "abort")
        for c, n in zip(running, LONG, strict=True):
            assert c.stop is Stop.ABORT
            assert 0 < len(c.ids) < n
            assert set(c.versions) == {OLD}
        assert late.stop is Stop.LENGTH
        assert set(late.versions) == {NEW}
        prefix = running[0]
        more = replace(request("a", [3, 4, *prefix.ids], LONG[0]), drawn=len(prefix.ids))
        rest = await e.generate(more)
        assert len(prefix.ids) + len(rest.ids) == LONG[0]
        expected = full_logprobs(e.setup.adapter, decoder_of(e).model, more.prompt, rest.ids)
        assert rest.logprobs == pytest.approx(expected, abs=1e-5)

    serving(test, max_rows=2)


def test_drain_lets_running_requests_finish_while_new_ones_wait() -> None:
    async def test(e: TorchEngine) -> None:
        running, late = await halfway(e, "drain")
        for c, n in zip(running, LONG, strict=True):
            assert c.stop is Stop.LENGTH
            assert len(c.ids) == n
            assert set(c.versions) == {OLD}
        assert set(late.versions) == {NEW}

    serving(test)


@pytest.mark.parametrize("interrupt", ["continue", "abort", "drain"])
def test_refused_weights_disturb_nothing(interrupt: Interrupt) -> None:
    async def test(e: TorchEngine) -> None:
        expected = await e.generate(request("a", [3, 4], 12))
        good = update(e)
        names = [info.name for info in good.manifest.tensors]
        unknown = replace(
            good, manifest=replace(good.manifest, tensors=(good.manifest.tensors[0]._replace(name="other"),))
        )
        flipped = update(e)
        flipped.handle.buffer[100] ^= 1  # type: ignore[attr-defined]
        (running,) = pending(e, [request("a", [3, 4], 12)])
        await until(lambda: decoder_of(e).running("train") == 1)
        for bad, reason in ((unknown, "no such tensor"), (flipped, f"{names[0]}.*checksum")):
            with pytest.raises(WeightsError, match=reason):
                await e.load_weights(bad, interrupt)
        assert await running == expected
        assert (await e.health())["version"] == 0
        await e.load_weights(good, interrupt)
        assert (await e.health())["version"] == 1

    serving(test)
