"""The stage ``reference``: its columns against the trainer's and a plain forward's, its refreshes, what it keeps in
checkpoints, and how it works on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import Kl
from relax_core.bus import Bus, Claim, Holder
from relax_core.config.schema import SamplingSection
from relax_core.errors import CheckpointError, ConfigError, WeightsError
from relax_core.interfaces import Member, ModelAdapter, Row, ScoredGroup, Transport
from relax_core.media import MediaStore
from relax_core.setup import StageSetup
from relax_core.stages import serve
from relax_core.testing.stages import columns_of, plain_logprobs
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import forward, row, tiny_run, tiny_trainer, train
from relax_core.torch.layout import Kind
from relax_core.torch.optim import named_tensors
from relax_core.torch.reference import Reference
from relax_core.torch.stage_config import ReferenceConfig
from relax_core.transports import CopyTransport
from relax_core.types import MediaRef, Version

BANS = (4, 9, 17)


def banning(**settings: Any) -> TinyAdapter:
    """Bans some words too, so that bans matter."""
    adapter = tiny_adapter(**settings)
    adapter.banned_token_ids = (*adapter.banned_token_ids, *BANS)
    return adapter


def setup_of(adapter: ModelAdapter, columns: frozenset[str], temperature: float = 1.0) -> StageSetup:
    run = tiny_run(sampling=SamplingSection(temperature=temperature))
    return StageSetup(run, adapter, adapter.media, columns)


def reference(adapter: ModelAdapter | None = None, temperature: float = 1.0, **settings: Any) -> Reference:
    config = ReferenceConfig(device="cpu", **settings)
    return Reference(config, setup_of(adapter or banning(), frozenset({"ref_logprobs"}), temperature))


def group_rows(group: str = "g0", members: int = 5, seed: int = 0) -> list[Row]:
    """Replies of 1, 2, ... tokens to one prompt; the last has an observation in it, one is masked altogether."""
    draw = np.random.default_rng(seed)
    allowed = [i for i in range(3, 30) if i not in BANS]
    prompt = draw.integers(5, 30, 4).tolist()
    made = []
    for i in range(1, members + 1):
        mask = [1] * i
        if i == members:
            mask[1:3] = [0, 0]
        made.append(row(f"{group}/{i}/0", prompt, draw.choice(allowed, i).tolist(), mask, advantage=0.0))
    made.append(row(f"{group}/{members + 1}/0", prompt, draw.choice(allowed, 2).tolist(), [0, 0], units=0.0))
    return made


def publish(transport: Transport, number: int, model: torch.nn.Module, shift: float = 0.0) -> Any:
    return transport.publish(Version(0, number), [(n, t.detach() + shift) for n, t in named_tensors(model)])


# --- what they compute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_with_the_policys_weights_it_is_the_trainers_own(layout: Kind, temperature: float) -> None:
    stage = reference(layout=layout, temperature=temperature)
    trainer = tiny_trainer(banning(), temperature, layout=layout)
    rows = group_rows()
    made = columns_of(stage, rows)
    for line, own in zip(rows, forward(trainer, rows), strict=True):
        found = made[line.id]["ref_logprobs"]
        assert found.dtype == np.float32 and found.shape == line.columns["tokens"].shape
        assert found.tobytes() == own["logprobs"].tobytes()
        assert (found[line.columns["mask"] == 0] == 0).all()


def test_cuts_and_layouts_do_not_matter_and_bans_and_temperature_do() -> None:
    rows = [*group_rows("g0"), *group_rows("g1", seed=1)]
    alone = [columns_of(reference(temperature=0.7), group_rows(g, seed=s)) for g, s in (("g0", 0), ("g1", 1))]
    trainer = tiny_trainer(banning(), 0.7, layout="padded", tokens_per_micro_batch=16)
    other = forward(trainer, rows)
    warm = columns_of(reference(temperature=1.0), rows)
    free = columns_of(reference(tiny_adapter(), temperature=0.7), rows)
    made = alone[0] | alone[1]
    model = banning().load("cpu", torch.float32)
    for line, own in zip(rows, other, strict=True):
        found, mask = made[line.id]["ref_logprobs"], line.columns["mask"] > 0
        assert found == pytest.approx(own["logprobs"], rel=1e-6, abs=1e-6)
        plain_SV = plain_logprobs(banning(), model, line, 0.7)
        wanted_S = plain_SV.gather(1, torch.tensor(line.columns["tokens"][mask].astype(np.int64))[:, None])[:, 0]
        assert found[mask] == pytest.approx(wanted_S.detach().numpy(), abs=1e-5)
        if mask.any():
            for wrong in (warm, free):
                assert np.abs(found[mask] - wrong[line.id]["ref_logprobs"][mask]).max() > 1e-3


# --- weights ----------------------------------------------------------------------------------------------------------


def test_it_refreshes_at_its_versions_only() -> None:
    stage = reference(refresh=2)
    transport = CopyTransport(CopyTransport.Config())
    first = {n: t.clone() for n, t in named_tensors(stage.model)}
    policy = banning().load("cpu", torch.float32)
    taken = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 4}
    for version, held in taken.items():
        asyncio.run(stage.load_weights(publish(transport, version, policy, shift=float(version))))
        for name, tensor in named_tensors(stage.model):
            assert torch.equal(tensor, first[name] + float(held)), (version, name)
    assert stage.refreshed
    broken = publish(transport, 6, policy)
    transport._flats[-1].buffer[7] ^= 1
    with pytest.raises(WeightsError, match="checksum"):
        asyncio.run(stage.load_weights(broken))
    assert all(torch.equal(tensor, first[name] + 4.0) for name, tensor in named_tensors(stage.model))


def test_without_refresh_it_stays_as_it_is() -> None:
    stage = reference()
    first = {n: t.clone() for n, t in named_tensors(stage.model)}
    transport = CopyTransport(CopyTransport.Config())
    for version in range(3):
        asyncio.run(stage.load_weights(publish(transport, version, stage.model, shift=1.0)))
    assert all(torch.equal(t, first[n]) for n, t in named_tensors(stage.model)) and not stage.refreshed


def test_new_weights_wait_for_the_group_at_work() -> None:
    stage = reference(refresh=1, tokens_per_micro_batch=4)
    rows = group_rows()
    before = columns_of(stage, rows)
    transport = CopyTransport(CopyTransport.Config())
    claim = Claim("reference", Holder("reference", 0), tuple(rows), ("g0",))

    async def both() -> Any:
        running = asyncio.create_task(stage.run(claim))
        await asyncio.sleep(0)  # one micro-batch, and it is the others' turn
        assert not running.done()
        update = publish(transport, 1, stage.model, shift=0.5)
        loading = asyncio.create_task(stage.load_weights(update))
        await asyncio.sleep(0)
        assert not loading.done()
        made = await running
        await loading
        return made

    made = asyncio.run(both())
    for id, columns in before.items():
        assert columns["ref_logprobs"].tobytes() == made[id]["ref_logprobs"].tobytes()
    assert any((columns_of(stage, rows)[id]["ref_logprobs"] != c["ref_logprobs"]).any() for id, c in before.items())


def test_a_checkpoint_holds_a_refreshed_reference_to_the_bit(tmp_path: Path) -> None:
    stage, fresh, rows = reference(refresh=3), reference(refresh=3), group_rows()
    stage.save(tmp_path / "unchanged")
    assert not (tmp_path / "unchanged").exists()
    fresh.load(tmp_path / "unchanged")
    assert not fresh.refreshed
    policy = banning(seed=8).load("cpu", torch.float32)
    asyncio.run(stage.load_weights(publish(CopyTransport(CopyTransport.Config()), 3, policy)))
    stage.save(tmp_path / "changed")
    assert [path.name for path in (tmp_path / "changed").iterdir()] == ["weights.safetensors"]
    fresh.load(tmp_path / "changed")
    assert fresh.refreshed
    held, again = dict(named_tensors(stage.model)), dict(named_tensors(fresh.model))
    assert all(torch.equal(again[name], tensor) for name, tensor in held.items())
    made, repeated = columns_of(stage, rows), columns_of(fresh, rows)
    assert all(made[id]["ref_logprobs"].tobytes() == repeated[id]["ref_logprobs"].tobytes() for id in made)


def test_a_checkpoint_of_another_model_or_of_rubbish_is_refused(tmp_path: Path) -> None:
    stage, wide = reference(refresh=1), reference(banning(hidden=64), refresh=1)
    asyncio.run(wide.load_weights(publish(CopyTransport(CopyTransport.Config()), 1, wide.model)))
    wide.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"stages.reference: .*weights.safetensors is of another model: .*shape"):
        stage.load(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="cannot be read"):
        stage.load(tmp_path)


def test_a_refresh_with_a_model_of_another_shape_fails_at_the_first_version() -> None:
    stage = reference(banning(hidden=64), refresh=50)
    transport = CopyTransport(CopyTransport.Config())
    policy = banning().load("cpu", torch.float32)
    with pytest.raises(ConfigError) as error:
        asyncio.run(stage.load_weights(publish(transport, 0, policy)))
    assert "stages.reference.refresh: found 50" in str(error.value) and "\n" not in str(error.value)
    assert "(32, 32) there and (32, 64) here" in str(error.value)
    deeper = reference(banning(layers=3), refresh=50)
    with pytest.raises(ConfigError, match=r"they lack model.layers.2.*leave refresh out"):
        asyncio.run(deeper.load_weights(publish(transport, 0, policy)))
    asyncio.run(reference(banning(layers=3)).load_weights(publish(transport, 0, policy)))  # nothing to refresh: fine


# --- at work on the bus -----------------------------------------------------------------------------------------------


async def scored(bus: Bus, holder: Holder, serial: int, rows: Sequence[Row], reward: bool = True) -> None:
    group = rows[0].group
    await bus.open_group(group, serial, None, holder)
    await bus.put({r.id: {k: v for k, v in r.columns.items() if k != "reward"} for r in rows}, holder, group)
    await bus.close_group(group, len(rows), holder)
    if reward:
        await bus.put({r.id: {"reward": 1.0} for r in rows}, holder)


def test_only_scored_groups_are_computed_one_at_a_time_and_an_evicted_one_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = reference()
    seen: list[str] = []
    real = stage.annotator.forward

    async def work() -> Any:
        bus = Bus(1000, 1 << 30)
        holder = bus.register("rollout")

        async def spied(rows: Sequence[Row], *rest: Any) -> Any:
            seen.append("+".join(dict.fromkeys(r.group for r in rows)))
            made = await real(rows, *rest)
            if rows[0].group == "g1":
                await bus.evict("g1")
            return made

        monkeypatch.setattr(stage.annotator, "forward", spied)
        for serial, (name, reward) in enumerate([("g0", True), ("g1", True), ("g2", False), ("g3", True)]):
            await scored(bus, holder, serial, group_rows(name, seed=serial), reward)
        serving = asyncio.create_task(serve(stage, bus, "reference"))
        claim = await bus.claim("train", frozenset({"ref_logprobs"}), 2, "group", bus.register("train"), exact=True)
        await bus.close()
        await serving
        return claim

    claim = asyncio.run(asyncio.wait_for(work(), 30))
    assert seen == ["g0", "g1", "g3"] and claim.groups == ("g0", "g3")
    assert all(r.columns["ref_logprobs"].any() == (not r.id.endswith("/6/0")) for r in claim.rows)


def test_media_stay_in_the_store_while_they_are_read() -> None:
    store = MediaStore({}, max_bytes=1)
    adapter = banning(media=store, images=True)
    key = store.features("colour", lambda: {"colour": np.ones(3, np.float32)})
    store.retain([key])
    image = adapter.ids["<image>"]
    ref = MediaRef("image", key, 0, 1)
    rows = [row(f"g/{i}/0", [image, 7, 8], [10 + i, 11, 12], media=[ref]) for i in range(4)]
    stage = reference(adapter, tokens_per_micro_batch=4)
    claim = Claim("reference", Holder("reference", 0), tuple(rows), ("g",))

    async def evicted_meanwhile() -> None:
        running = asyncio.create_task(stage.run(claim))
        await asyncio.sleep(0)
        store.release([key])  # the group is gone: nobody else holds its media
        store.features("other", lambda: {"colour": np.zeros(3, np.float32)})  # and the store is full
        assert not running.done() and len(await running) == 4

    asyncio.run(evicted_meanwhile())
    store.features("third", lambda: {"colour": np.zeros(3, np.float32)})
    assert key not in store


# --- what a reference is for ------------------------------------------------------------------------------------------


def kl_to(made: dict[str, Any], trainer: Any, rows: Sequence[Row]) -> float:
    """Mean k3 over the sampled tokens."""
    found = []
    for line, own in zip(rows, forward(trainer, rows), strict=True):
        d = (own["logprobs"] - made[line.id]["ref_logprobs"])[line.columns["mask"] > 0].astype(np.float64)
        found += (np.exp(-d) - 1 + d).tolist()
    return float(np.mean(found))


def test_kl_in_the_loss_pulls_the_policy_to_the_reference() -> None:
    rows = group_rows()
    made = columns_of(reference(banning(seed=3)), rows)
    rows = [replace(r, columns={**r.columns, **made[r.id]}) for r in rows]
    trainer = tiny_trainer(banning())
    algorithm = Grpo(Grpo.Config(kl=Kl(coefficient=0.5)))
    distances = [kl_to(made, trainer, rows)]
    for step in range(4):
        result = train(trainer, step, [rows], algorithm)
        assert result.metrics["kl_ref"] == pytest.approx(distances[-1], rel=1e-4)
        assert result.metrics["loss"] == pytest.approx(0.5 * distances[-1], rel=1e-4)
        distances.append(kl_to(made, trainer, rows))
    assert all(later < earlier for earlier, later in pairwise(distances))
    assert distances[-1] < 0.7 * distances[0]


def test_kl_in_the_reward_lowers_the_advantage_of_what_lies_far_from_the_reference() -> None:
    def member(name: int, far: float) -> Member:
        line = row(f"g/{name}/0", [5, 6], [7, 8, 9], reward=1.0)
        reference_T = np.where(line.columns["mask"], line.columns["logprobs"] - far, 0).astype(np.float32)
        line = row(f"g/{name}/0", [5, 6], [7, 8, 9], reward=1.0, ref_logprobs=reference_T)
        return Member(1.0, {}, [line])

    group = ScoredGroup("g", cast(Any, None), [member(0, 0.0), member(1, 0.0), member(2, 2.0)])
    made = Grpo(Grpo.Config(kl=Kl(place="reward", coefficient=0.1))).advantages([group])
    near, far = made["g/0/0"]["advantages"][2], made["g/2/0"]["advantages"][2]
    # Rewards 1, 1, 1 - 0.1 * 3 * 2 = 0.4: mean 0.8, deviation sqrt((0.04 + 0.04 + 0.16) / 2) = 0.34641.
    assert near == pytest.approx(0.2 / 0.34641, abs=1e-4) and far == pytest.approx(-0.4 / 0.34641, abs=1e-4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
