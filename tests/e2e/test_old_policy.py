"""Runs whose old policy has weights of its own: training begins while it still computes, and gives what the trainer's
own old log-probs give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import RelaxError
from relax_core.hookspecs import Callback, ForwardEvent, StepStart
from relax_core.interfaces import Batch, Columns, Row
from relax_core.old_policy import OldPolicy
from relax_core.run import Run
from relax_core.runtime import LocalRuntime, Note, Roles
from relax_core.testing.runs import metrics, run_file, train
from relax_core.torch.policy_copy import PolicyCopy
from relax_core.types import Version
from relax_core.weights import WeightUpdate

pytestmark = pytest.mark.timeout(60)

GROUPS, STEPS = 4, 3
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "groups_per_step": GROUPS,
    "evaluation": [],
    "plugins": ["algorithms-extra"],
    "trainer": {"lr": 1e-2, "tokens_per_micro_batch": 32},
}
STREAMED: dict[str, Any] = {"updates_per_step": 2}
WHOLE: dict[str, dict[str, Any]] = {
    "credit of the step": {"updates_per_step": 2, "algorithm": {"id": "grpo", "whiten": True}},
    "prepared": {"algorithm": {"id": "m2po"}},
}


class Watched(OldPolicy):
    """An old policy of its own that says what it does; the last group of a step waits for ``door``."""

    apart = True

    def __init__(self, copy: PolicyCopy, log: list[tuple[str, int]], door: asyncio.Event | None, off: int = 0) -> None:
        self.copy, self.log, self.door, self.off, self.calls = copy, log, door, off, 0

    async def forward(self, rows: Sequence[Row], version: Version) -> list[Columns]:
        assert len({row.group for row in rows}) == 1
        self.calls += 1
        self.log.append(("asked", version.number))
        if self.door is not None and self.calls % GROUPS == 0:
            await asyncio.wait_for(self.door.wait(), 30)
        found = await self.copy.forward(rows, version)
        self.log.append(("answered", version.number))
        return found

    async def load_weights(self, update: WeightUpdate) -> None:
        version = update.manifest.version
        self.log.append(("loaded", version.number))
        manifest = replace(update.manifest, version=Version(version.lineage, version.number + self.off))
        await self.copy.load_weights(replace(update, manifest=manifest))


class Watcher(Callback):
    """Opens the door when the trainer computes its first micro-batch of a step."""

    def __init__(self, log: list[tuple[str, int]], door: asyncio.Event) -> None:
        self.log, self.door = log, door

    def on_step_start(self, run: Run, event: StepStart) -> None:
        self.door.clear()

    def before_forward(self, run: Run, value: Batch, event: ForwardEvent) -> Batch:
        self.log.append(("trained", event.step))
        self.door.set()
        return value

    def on_batch_ready(self, run: Run, event: Any) -> None:
        self.log.append(("ready", event.step))


def trained(
    path: Path, monkeypatch: pytest.MonkeyPatch, hold: bool = False, off: int = 0, **changes: Any
) -> tuple[Path, list[tuple[str, int]]]:
    """A local run with an old policy of its own, and what happened in it. ``hold``: its last answer of each step waits
    until the trainer has begun. ``off``: it takes each version for a later one."""
    log: list[tuple[str, int]] = []
    door = asyncio.Event()
    begin = LocalRuntime.start

    async def start(self: LocalRuntime, run: Run, note: Note, training: bool = True) -> Roles:
        roles = await begin(self, run, note, training)
        old = Watched(PolicyCopy(run, roles.adapter), log, door if hold else None, off)
        return replace(roles, old_policy=old)

    with monkeypatch.context() as patch:
        patch.setattr(LocalRuntime, "start", start)
        directory = train(run_file(path, **SETTINGS | changes), callback=Watcher(log, door))
    return directory, log


def of_step(log: list[tuple[str, int]], step: int) -> list[str]:
    return [what for what, number in log if number == step]


def alike(one: Path, other: Path) -> bool:
    pairs = list(zip(metrics(one), metrics(other), strict=True))
    for a, b in pairs:
        for name in ("train/loss", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name
        for name in ("reward", "train/tokens", "train/cuts", "length/trained"):
            assert a[name] == b[name], name
    return len(pairs) == STEPS


def test_training_begins_while_the_old_policy_still_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last answer of each step comes only after the trainer's first micro-batch: waiting for all would not end."""
    own = train(run_file(tmp_path / "own", **SETTINGS | STREAMED))
    apart, log = trained(tmp_path / "apart", monkeypatch, hold=True, **STREAMED)
    assert alike(own, apart)
    for step in range(STEPS):
        found = of_step(log, step)
        assert found.count("asked") == found.count("answered") == GROUPS and found.count("ready") == 1
        assert found[0] == "loaded", "weights of the step's start come before its rows"
        assert found.index("trained") < len(found) - 1 - found[::-1].index("answered")


@pytest.mark.parametrize("kind", WHOLE)
def test_what_belongs_to_the_whole_step_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    own = train(run_file(tmp_path / "own", **SETTINGS | WHOLE[kind]))
    apart, log = trained(tmp_path / "apart", monkeypatch, **WHOLE[kind])
    assert alike(own, apart)
    for step in range(STEPS):
        found = of_step(log, step)
        assert found.count("answered") == GROUPS
        assert found.index("trained") > len(found) - 1 - found[::-1].index("answered")


def test_nobody_asks_where_the_policy_itself_is_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody: list[dict[str, Any]] = [{}, {"updates_per_step": 2, "old": "engine"}]
    for changes in nobody:
        _, log = trained(tmp_path / str(len(changes)), monkeypatch, steps=1, **changes)
        assert "asked" not in of_step(log, 0) and "trained" in of_step(log, 0)


def test_another_version_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RelaxError, match=r"old policy: asked for log-probs under version 0 .*, it holds version 1 "):
        trained(tmp_path, monkeypatch, off=1, **STREAMED)
