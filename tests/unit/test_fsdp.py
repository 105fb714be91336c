"""A divided trainer (FSDP2) computes what a replicated one does, and their checkpoints are the same. Real processes.

This file is also the program of the ranks.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_core.actor_critic import CRITIC
from relax_core.config.schema import SamplingSection
from relax_core.errors import CheckpointError, RelaxError
from relax_core.interfaces import Algorithm, Batch, Columns, Cut, Loss, ModelAdapter, Outputs, Row, ScoredGroup
from relax_core.setup import TrainerSetup
from relax_core.testing.gradients import banning, rows_of_lengths
from relax_core.testing.ranks import distance, fork_ranks, run_ranks
from relax_core.testing.training import row, tiny_run
from relax_core.torch.config import TrainerConfig
from relax_core.torch.fsdp import part_of
from relax_core.torch.ranks import Ranks, join, leave
from relax_core.torch.trainer import TorchTrainer
from relax_core.types import LearnerName

BOTH = frozenset({"logprobs", "values"})
LEARNERS: tuple[LearnerName, ...] = ("policy", "critic")
ROWS = rows_of_lengths([3, 1, 9, 4, 2, 6, 7, 8])


class ActorCritic(Algorithm):
    """-A log pi and (V - 1)^2 / 2, as sums."""

    outputs = BOTH

    def __init__(self) -> None:
        pass

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        raise NotImplementedError

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        return Loss(-(batch.advantages_BT * outputs.logprobs_BT)[batch.mask_BT].sum(), {})

    def value_loss(self, batch: Batch, values_BT: torch.Tensor) -> Loss:
        return Loss((values_BT - 1)[batch.mask_BT].square().sum() / 2, {})


class Failing(Grpo):
    """Its loss fails where a row has the advantage 7."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        if (batch.advantages_BT == 7).any():
            raise RelaxError("seven")
        return super().loss(batch, outputs)


def trainer_of(
    ranks: Ranks,
    outputs: frozenset[str] = frozenset({"logprobs"}),
    adapter: ModelAdapter | None = None,
    learner: LearnerName = "policy",
    **settings: Any,
) -> TorchTrainer:
    run = tiny_run(sampling=SamplingSection(temperature=0.7))
    own = {"lr": 1e-2, "eps": 1e-2, "device": "cpu", "tokens_per_micro_batch": 24, "weight_decay": 0.1}
    critic = {"lr": 1e-2} if "values" in outputs else {}
    config = TrainerConfig(**{**own, "critic": critic, **settings})
    return TorchTrainer(config, TrainerSetup(adapter or banning(), run, outputs, ranks, learner))


def step(trainer: TorchTrainer, number: int, cuts: Sequence[Cut], algorithm: Algorithm | None = None) -> dict[str, Any]:
    async def plan() -> AsyncIterator[Cut]:
        for cut in cuts:
            yield cut

    algorithm = algorithm or Grpo(Grpo.Config())
    return dict(asyncio.run(trainer.step(number, plan() if trainer.ranks.first else None, algorithm)).metrics)


def forward(trainer: TorchTrainer, rows: Sequence[Row], *outputs: str) -> list[Columns]:
    return asyncio.run(trainer.forward(rows if trainer.ranks.first else [], frozenset(outputs)))


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def omni() -> tuple[ModelAdapter, list[Row]]:
    """A model with towers, and a row of each medium: at most one rank has pictures."""
    from relax_plugin_omni.testing import mixed_rows, tiny_omni

    adapter = tiny_omni()
    words = [i for i in range(adapter.vocab_size) if i not in adapter.banned_token_ids][:4]
    rows = []
    for i, encoded in enumerate(mixed_rows(adapter)[:4]):
        rows.append(row(f"m{i}/0/0", encoded.ids, words, advantage=0.5 + i, media=encoded.media))
    return adapter, rows


def moved(trainer: TorchTrainer) -> None:
    """Out of the memory in which it is, as for a GPU's next user, and back."""
    before = {id(p): part_of(p).data_ptr() for p in trainer.learner.module.parameters()}
    trainer.learner.leave()
    assert all(part_of(p).data_ptr() != before[id(p)] for p in trainer.learner.module.parameters())
    trainer.learner.enter("cpu")


def trained(ranks: Ranks, moves: bool = False, **settings: Any) -> dict[str, Any]:
    """Several cuts, several updates, a row alone. ``moves``: everything leaves its memory after the first step."""
    trainer = trainer_of(ranks, **settings)
    cuts = [
        [Cut(ROWS[:5], False), Cut(ROWS[5:], True)],
        [Cut(ROWS[:4], True), Cut(ROWS[4:], True)],
        [Cut(ROWS[4:5], True)],
    ]
    metrics = []
    for number, some in enumerate(cuts):
        metrics.append(step(trainer, number, some))
        if moves and number == 0:
            moved(trainer)
    columns = [dict(c) for c in forward(trainer, ROWS, "logprobs")]
    return {"metrics": metrics, "weights": weights(trainer), "forward": columns, "memory": trainer.memory()}


def with_critic(ranks: Ranks, folder: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Two steps of policy and critic; with a checkpoint between them, or from one on."""
    resumes = folder is not None and folder.exists()
    found: dict[str, Any] = {"metrics": {}}
    for learner in LEARNERS:
        trainer = trainer_of(ranks, BOTH, learner=learner, **settings)
        where = None if folder is None else folder / ("" if learner == "policy" else CRITIC)
        if resumes and where is not None:
            trainer.load(where)
        else:
            step(trainer, 0, [Cut(ROWS[:3], False), Cut(ROWS[3:], True)], ActorCritic())
            if where is not None:
                trainer.save(where)
                continue
        found["metrics"] |= step(trainer, 1, [Cut(ROWS, True)], ActorCritic())
        found |= {learner: weights(trainer)}
    if not resumes and folder is not None:
        return {}
    return found | {"values": [np.asarray(c["values"]) for c in forward(trainer, ROWS, "values")]}


def with_media(ranks: Ranks, **settings: Any) -> dict[str, Any]:
    """Rows with and without media, and a step without any: what no row reaches does not move."""
    adapter, rows = omni()
    trainer = trainer_of(ranks, adapter=adapter, tokens_per_micro_batch=4096, **settings)
    for number, some in enumerate((rows, rows[:1], rows[1:2])):
        step(trainer, number, [Cut(some, True)])
    return {"weights": weights(trainer)}


def failed(ranks: Ranks) -> list[str]:
    """A loss that fails on one rank, and one that trains afterwards."""
    trainer = trainer_of(ranks, sharding="fsdp")
    seven = replace(
        ROWS[0], columns={**ROWS[0].columns, "advantages": np.where(ROWS[0].columns["mask"], 7, 0).astype(np.float32)}
    )
    said: list[str] = []
    try:
        step(trainer, 0, [Cut([seven, *ROWS[1:]], True)], Failing(Grpo.Config()))
    except RelaxError as error:
        said = ranks.gather(str(error))
    assert weights(trainer)["model.norm.weight"].isfinite().all()
    step(trainer, 1, [Cut(ROWS, True)], Failing(Grpo.Config()))
    return said


# --- what the ranks do ------------------------------------------------------------------------------------------------


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in (1, 2, 3):
        if rank >= size:
            continue
        ranks = join(rank, size, f"file://{folder}/store-{size}", timeout=60)
        try:
            for sharding in ("replicate",) if size == 1 else ("fsdp",):
                key = f"{sharding} {size}"
                found[key] = trained(ranks, sharding=sharding)
                if size == 1:
                    with_critic(ranks, folder / "saved-1", sharding=sharding)
                    found[f"critic {key}"] = with_critic(ranks, sharding=sharding)
                    found[f"media {key}"] = with_media(ranks, sharding=sharding)
                    found[f"half {key}"] = trained(ranks, sharding=sharding, dtype="bfloat16")
            if size == 2:
                found["critic fsdp 2"] = with_critic(ranks, sharding="fsdp")
                found["media fsdp 2"] = with_media(ranks, sharding="fsdp")
                found["media replicate 2"] = with_media(ranks)
                found["half fsdp 2"] = trained(ranks, sharding="fsdp", dtype="bfloat16")
                found["moved"] = trained(ranks, sharding="fsdp", moves=True)
                found["checkpointing"] = trained(ranks, sharding="fsdp", gradient_checkpointing=True)
                found["failed"] = failed(ranks)
                with_critic(ranks, folder / "saved-fsdp-2", sharding="fsdp")
                with_critic(ranks, folder / "saved-replicate-2")
                found["1 to fsdp 2"] = with_critic(ranks, folder / "saved-1", sharding="fsdp")
                found["1 to 2"] = with_critic(ranks, folder / "saved-1")
                found["fsdp 2 to replicate 2"] = with_critic(ranks, folder / "saved-fsdp-2")
                found["replicate 2 to fsdp 2"] = with_critic(ranks, folder / "saved-replicate-2", sharding="fsdp")
            if size == 3:
                found["2 to fsdp 3"] = with_critic(ranks, folder / "saved-replicate-2", sharding="fsdp")
                found["missing"] = missing(ranks, folder)
        finally:
            leave()
    if rank == 0:
        from relax_core.torch.ranks import ALONE

        found["fsdp 2 to 1"] = with_critic(ALONE, folder / "saved-fsdp-2")
        torch.save(found, folder / "found.pt")


def missing(ranks: Ranks, folder: Path) -> list[str]:
    try:
        trainer_of(ranks, BOTH, sharding="fsdp").load(folder / "nowhere")
    except CheckpointError as error:
        return ranks.gather(str(error))
    raise AssertionError("loaded nothing")


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__), folder, timeout=110)
    loaded: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return loaded


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["fsdp 2", "fsdp 3", "checkpointing"])
def test_dividing_changes_nothing(found: dict[str, Any], case: str) -> None:
    one, many = found["replicate 1"], found[case]
    assert distance(one["weights"], many["weights"]) < 1e-6
    for a, b in zip(one["metrics"], many["metrics"], strict=True):
        for name in a.keys() - {"computed_tokens"}:
            assert b[name] == pytest.approx(a[name], rel=2e-5, abs=2e-6), name
    for a, b in zip(one["forward"], many["forward"], strict=True):
        assert np.abs(a["logprobs"] - b["logprobs"]).max() < 1e-5
    parts = many["memory"], one["memory"]
    assert parts[0]["weights"] < 0.65 * parts[1]["weights"] and parts[0]["optimizer"] < 0.65 * parts[1]["optimizer"]


@pytest.mark.timeout(120)
def test_parts_that_left_their_memory_come_back_with_their_bits(found: dict[str, Any]) -> None:
    assert distance(found["fsdp 2"]["weights"], found["moved"]["weights"]) == 0
    assert found["fsdp 2"]["metrics"] == found["moved"]["metrics"]


@pytest.mark.timeout(120)
def test_half_precision_keeps_float32_masters(found: dict[str, Any]) -> None:
    one, many = found["half replicate 1"], found["half fsdp 2"]
    assert all(t.dtype == torch.bfloat16 for t in many["weights"].values())
    assert distance(one["weights"], many["weights"]) < 0.02
    assert many["metrics"][0]["grad_norm"] == pytest.approx(one["metrics"][0]["grad_norm"], rel=0.02)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["media replicate 2", "media fsdp 2"])
def test_ranks_with_and_without_media(found: dict[str, Any], case: str) -> None:
    assert distance(found["media replicate 1"]["weights"], found[case]["weights"]) < 1e-6


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [
        "critic fsdp 2",
        "1 to 2",
        "1 to fsdp 2",
        "fsdp 2 to replicate 2",
        "replicate 2 to fsdp 2",
        "2 to fsdp 3",
        "fsdp 2 to 1",
    ],
)
def test_a_checkpoint_goes_on_under_any_division(found: dict[str, Any], case: str) -> None:
    one, other = found["critic replicate 1"], found[case]
    assert distance(one["policy"], other["policy"]) < 1e-6
    assert distance(one["critic"], other["critic"]) < 1e-6
    assert other["metrics"]["critic_grad_norm"] == pytest.approx(one["metrics"]["critic_grad_norm"], rel=1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(one["values"], other["values"], strict=True)) < 1e-5


@pytest.mark.timeout(120)
def test_errors_reach_every_rank(found: dict[str, Any]) -> None:
    assert found["failed"] == ["seven", "seven"]
    assert len(found["missing"]) == 3 and all("has no critic" in said for said in found["missing"])


if __name__ == "__main__":
    import relax_plugin_omni.testing  # noqa: F401

    fork_ranks(3, lambda rank: main(rank, Path(sys.argv[1])))
