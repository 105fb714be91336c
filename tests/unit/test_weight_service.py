"""Who gives weights to whom; and a peer that serves what it has when the trainer is gone."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from relax_core.errors import WeightsError
from relax_core.testing.engines import decoder_of, request, serving
from relax_core.torch.engine import TorchEngine
from relax_core.torch.optim import named_tensors
from relax_core.types import Version
from relax_core.weight_service import Coordinator, Holding, Transfer


def holding(member: str, lineage: int, number: int, source: bool = True) -> Holding:
    return Holding(member, Version(lineage, number), source=source)


def test_holders_and_the_newest_version() -> None:
    c = Coordinator()
    assert c.newest() is None
    for name, number in (("trainer", 4), ("engine-1", 4), ("engine-0", 3)):
        c.report(holding(name, 0, number))
    assert c.newest() == Version(0, 4)
    assert c.holders(Version(0, 4)) == ["engine-1", "trainer"]
    c.report(holding("engine-0", 0, 4))
    assert c.holders(Version(0, 4)) == ["engine-0", "engine-1", "trainer"]
    assert c.holders(Version(0, 3)) == []


def test_an_older_lineage_never_wins() -> None:
    c = Coordinator()
    c.report(holding("engine-0", 0, 90))
    c.report(holding("trainer", 1, 80))
    assert c.newest() == Version(1, 80)
    assert c.source_for("engine-0").member == "trainer"
    c.lost("trainer")
    assert c.newest() == Version(0, 90)


def test_sources_are_living_and_share_the_load() -> None:
    c = Coordinator()
    for name, number in (("a", 2), ("b", 2), ("old", 1)):
        c.report(holding(name, 0, number))
    c.report(holding("mute", 0, 2, source=False))
    assert [c.source_for(f"new-{i}").member for i in range(4)] == ["a", "b", "a", "b"]
    assert c.source_for("new-0").member == "a"  # who asks again is not counted twice
    c.lost("a")
    assert [c.source_for(f"new-{i}").member for i in range(2)] == ["b", "b"]
    c.report(holding("new-2", 0, 2))  # it has received, and gives itself
    assert c.source_for("another").member == "new-2"
    assert c.source_for("b").member == "new-2"  # nobody is its own source
    for name in ("b", "new-2", "old"):
        c.lost(name)
    with pytest.raises(WeightsError, match="weights for x: no living member holds any"):
        c.source_for("x")


def test_it_is_rebuilt_from_its_members() -> None:
    c = Coordinator()
    reports = [holding("a", 0, 2), holding("b", 1, 1)]
    for report in reports:
        c.report(report)
    c.source_for("x")
    fresh = Coordinator()
    fresh.report(holding("gone", 7, 7))
    fresh.rebuild(replace(report) for report in reports)
    assert fresh.newest() == c.newest() == Version(1, 1)
    assert fresh.holders(Version(0, 2)) == ["a"]
    assert fresh.held("gone") is None
    assert fresh.source_for("x") == reports[1]


def test_the_log_gives_each_transfer_once() -> None:
    c = Coordinator(kept=3)
    for n in range(5):
        c.record(Transfer(Version(0, n), "engine-0", "trainer", 0.5, 10**9))
    rows = c.log()
    assert [row["version"] for row in rows] == [2, 3, 4]
    assert rows[0] == {
        "lineage": 0,
        "version": 2,
        "member": "engine-0",
        "source": "trainer",
        "seconds": 0.5,
        "bytes": 10**9,
        "gb_per_s": 2.0,
    }
    assert c.log() == []
    c.record(Transfer(Version(0, 4), "engine-1", "engine-0", 0.25, 10**9))
    assert [row["member"] for row in c.log()] == ["engine-1"]
    summary = {"receivers": 2, "bytes": 2e9, "seconds": 0.5, "gb_per_s/engine-0": 2, "gb_per_s/engine-1": 4}
    assert c.summary(Version(0, 4)) == summary


TRAINER = """
    import os, pickle, sys, torch
    from relax_core.transports import {kind}Transport as T
    from relax_core.types import Version
    weights = [(name, tensor + 0.5) for name, tensor in pickle.load(sys.stdin.buffer)]
    update = T(T.Config()).publish(Version(2, 7), weights, frozenset({{weights[0][0]}}))
    sys.stdout.buffer.write(pickle.dumps(update))
    sys.stdout.buffer.flush()
    import time; time.sleep(60)
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["Shared", "Tcp"])
@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_peer_serves_after_the_trainer_was_killed(kind: str, host: str | None) -> None:
    async def test(first: TorchEngine) -> None:
        named = [(name, t.clone()) for name, t in named_tensors(decoder_of(first).model)]
        code = textwrap.dedent(TRAINER.format(kind=kind))
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            trainer.stdin.write(pickle.dumps(named))
            trainer.stdin.close()
            update = pickle.load(trainer.stdout)
            await first.load_weights(update)
            os.kill(trainer.pid, signal.SIGKILL)
        late = TorchEngine(first.config, first.setup)
        await late.start()
        try:
            if kind == "Tcp":  # what only the trainer held is gone with it
                with pytest.raises(WeightsError, match="take them from a peer"):
                    await late.load_weights(update)
            shared = pickle.loads(pickle.dumps(await first.share_weights(host)))
            assert shared.manifest.version == Version(2, 7)
            assert shared.base is not None
            assert shared.base.id == update.base.id
            await late.load_weights(shared)
            theirs = dict(named_tensors(decoder_of(late).model))
            assert all(torch.equal(theirs[name], tensor + 0.5) for name, tensor in named)
            assert await late.generate(request("r", [3, 4], 6)) == await first.generate(request("r", [3, 4], 6))
            await first.load_weights(shared)  # its own words are taken back as well; then it shares them no more
            with pytest.raises(WeightsError):
                await asyncio.to_thread(list, shared.tensors())
        finally:
            await late.stop()

    serving(test)
