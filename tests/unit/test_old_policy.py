"""The old policy: when it is asked, and that a copy of the policy says what the trainer itself says, of one version."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.config.resolve import resolve
from relax_core.config.schema import SamplingSection
from relax_core.errors import RelaxError, WeightsError
from relax_core.interfaces import Algorithm, ModelAdapter, Row
from relax_core.old_policy import TrainerItself, prepared, prepares, recomputes_old, with_old_policy
from relax_core.plugins import activate
from relax_core.run import Run
from relax_core.testing.runs import TEXT_RUN
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import row, tiny_config, tiny_trainer
from relax_core.torch.layout import Kind
from relax_core.torch.optim import named_tensors
from relax_core.torch.policy_copy import PolicyCopy
from relax_core.torch.trainer import TorchTrainer
from relax_core.transports import CopyTransport
from relax_core.types import Version
from relax_core.weights import WeightUpdate

BANS = (4, 9, 17)


# --- when it is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "asked", "whole"),
    [
        ({}, False, False),
        ({"updates_per_step": 2}, True, False),
        ({"updates_per_step": 2, "old": "engine"}, False, False),
        ({"plugins": ["algorithms-extra"], "algorithm": {"id": "m2po"}}, True, True),
    ],
    ids=str,
)
def test_who_asks_for_it(changes: dict[str, Any], asked: bool, whole: bool) -> None:
    config, stack = resolve(copy.deepcopy(TEXT_RUN) | changes)
    algorithm: Algorithm = stack.build("algorithms", config.algorithm, where="algorithm")
    assert (recomputes_old(config, algorithm), prepares(algorithm)) == (asked, whole)


def test_what_is_prepared_of_a_step() -> None:
    """By ``m2po``, of all rows together."""
    config, stack = resolve(copy.deepcopy(TEXT_RUN) | {"plugins": ["algorithms-extra"], "algorithm": {"id": "m2po"}})
    algorithm: Algorithm = stack.build("algorithms", config.algorithm, where="algorithm")
    rows = [r.having({"old_logprobs": r.columns["logprobs"] - i}) for i, r in enumerate(group_rows())]
    own = algorithm.prepare(rows)
    assert own
    for before, after in zip(rows, prepared(algorithm, rows), strict=True):
        assert after.id == before.id and set(after.columns) == set(before.columns) | set(own.get(before.id, {}))


# --- a copy of the policy ---------------------------------------------------------------------------------------------


def banning() -> TinyAdapter:
    """Bans some words too, so that bans matter."""
    adapter = tiny_adapter()
    adapter.banned_token_ids = (*adapter.banned_token_ids, *BANS)
    return adapter


def pair(temperature: float = 1.0, **settings: Any) -> tuple[TorchTrainer, PolicyCopy]:
    """A trainer and an old policy of one run."""
    section = {"id": "torch", "device": "cpu", **settings}
    config = tiny_config(sampling=SamplingSection(temperature=temperature), trainer=section)
    run = Run(config, Path("runs/tiny"), activate(()))
    adapter: ModelAdapter = banning()
    return tiny_trainer(adapter, run=run, **settings), PolicyCopy(run, adapter)


def group_rows(groups: int = 3, members: int = 4) -> list[Row]:
    """Replies of 1, 2, ... tokens; of each group the last has no sampled token."""
    draw = np.random.default_rng(0)
    allowed = [i for i in range(3, 30) if i not in BANS]
    made = []
    for g in range(groups):
        prompt = draw.integers(5, 30, 4).tolist()
        for i in range(1, members + 1):
            mask = [int(i < members)] * i
            made.append(row(f"g{g}/{i}/0", prompt, draw.choice(allowed, i).tolist(), mask))
    return made


def publish(trainer: TorchTrainer, transport: CopyTransport, version: Version, shift: float = 0.0) -> WeightUpdate:
    """The trainer's weights, which move by so much before."""
    with torch.no_grad():
        for _, tensor in named_tensors(trainer.learner.module):
            tensor += shift
    return transport.publish(version, trainer.weights(), trainer.frozen_names())


def transport() -> CopyTransport:
    return CopyTransport(CopyTransport.Config())


def logprobs(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    return np.concatenate([r.columns["old_logprobs"] for r in rows])


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_says_what_the_trainer_says(layout: Kind, temperature: float) -> None:
    """Group by group, as it is asked, and all at once, at the start and after the policy moved."""

    async def test() -> None:
        trainer, old = pair(temperature, layout=layout, tokens_per_micro_batch=64)
        assert old.annotator.compute.kind == layout and old.annotator.pieces.budget == 64
        bus, itself = transport(), TrainerItself(trainer)
        rows = group_rows()
        seen = []
        for number, shift in enumerate((0.0, 0.02)):
            version = Version(0, number)
            await old.load_weights(publish(trainer, bus, version, shift))
            wanted = logprobs(await with_old_policy(itself, rows, version))
            assert np.array_equal(logprobs(await with_old_policy(old, rows, version)), wanted)
            parts = [await with_old_policy(old, rows[i : i + 4], version) for i in range(0, len(rows), 4)]
            assert np.abs(logprobs([r for part in parts for r in part]) - wanted).max() < 1e-5
            seen.append(wanted)
        assert np.abs(seen[0] - seen[1]).max() > 1e-3, "the policy did not move"

    asyncio.run(test())


@pytest.mark.parametrize("asked", [Version(0, 1), Version(0, 3), Version(1, 2)])
def test_another_version_is_an_error(asked: Version) -> None:
    async def test() -> None:
        trainer, old = pair()
        with pytest.raises(RelaxError, match=r"under version .*, it holds no published weights: a fault"):
            await old.forward(group_rows(), asked)
        await old.load_weights(publish(trainer, transport(), Version(0, 2)))
        said = rf"under version {asked.number} \(lineage {asked.lineage}\), it holds version 2 \(lineage 0\): a fault"
        with pytest.raises(RelaxError, match=said):
            await old.forward(group_rows(), asked)
        assert len(await old.forward(group_rows(), Version(0, 2))) == 12

    asyncio.run(test())


def test_weights_that_come_in_the_middle_of_a_forward_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_core.torch import annotate

    async def test() -> None:
        trainer, old = pair(tokens_per_micro_batch=8)
        rows, bus, first = group_rows(), transport(), Version(0, 0)
        await old.load_weights(publish(trainer, bus, first))
        wanted = await old.forward(rows, first)
        update = publish(trainer, bus, Version(0, 1), 0.05)
        go_on = asyncio.Event()

        class Halting:
            """In place of asyncio there: after each micro-batch it waits until it may go on."""

            @staticmethod
            async def sleep(seconds: float) -> None:
                await go_on.wait()

        monkeypatch.setattr(annotate, "asyncio", Halting)
        computing = asyncio.ensure_future(old.forward(rows, first))
        loading = asyncio.ensure_future(old.load_weights(update))
        await asyncio.wait([loading], timeout=0.3)
        assert not loading.done() and not computing.done()
        go_on.set()
        for one, other in zip(wanted, await computing, strict=True):
            assert np.array_equal(one["logprobs"], other["logprobs"])
        await loading
        with pytest.raises(RelaxError, match="it holds version 1"):
            await old.forward(rows, first)

    asyncio.run(test())


def test_damaged_weights_are_not_taken() -> None:
    async def test() -> None:
        trainer, old = pair()
        bus, rows = transport(), group_rows()
        await old.load_weights(publish(trainer, bus, Version(0, 0)))
        before = await old.forward(rows, Version(0, 0))
        update = publish(trainer, bus, Version(0, 1), 0.05)
        infos = update.manifest.tensors
        wrong = infos[-1]._replace(checksum=(infos[-1].checksum or 0) ^ 1)
        manifest = replace(update.manifest, tensors=(*infos[:-1], wrong))
        with pytest.raises(WeightsError, match=infos[-1].name):
            await old.load_weights(replace(update, manifest=manifest))
        after = await old.forward(rows, Version(0, 0))
        assert all(np.array_equal(a["logprobs"], b["logprobs"]) for a, b in zip(before, after, strict=True))

    asyncio.run(test())
