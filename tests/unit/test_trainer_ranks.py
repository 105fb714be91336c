"""The trainer over 1, 2 and 4 ranks: one gradient, one set of metrics, one checkpoint. Real processes over gloo.

This file is also the program of the ranks: it trains in groups of each size, and rank 0 writes down what came out.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_core.config.schema import SamplingSection
from relax_core.errors import DataError, RelaxError
from relax_core.hookspecs import Callback, ForwardEvent, OptimizerEvent
from relax_core.interfaces import VALUES, Algorithm, Batch, Columns, Cut, Loss, Outputs, ScoredGroup, StepResult
from relax_core.run import Run
from relax_core.setup import TrainerSetup
from relax_core.testing.gradients import banning, rows_of_lengths
from relax_core.testing.ranks import distance, fork_ranks, run_ranks
from relax_core.testing.training import row, tiny_run
from relax_core.torch.config import TrainerConfig
from relax_core.torch.ranks import Ranks, join, leave
from relax_core.torch.trainer import TorchTrainer
from relax_core.types import LearnerName

SIZES = (1, 2, 4)
BOTH = frozenset({"logprobs", "values"})
BUDGET = 24
"""Tokens of a micro-batch: a rank cuts its share too."""
LENGTHS = [3, 1, 9, 4, 2, 6, 7, 8, 5, 12]


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
        far = (values_BT - 1)[batch.mask_BT]
        return Loss(far.square().sum() / 2, {"far": (far.detach().sum(), batch.mask_BT.sum())})


class Watch(Callback):
    """Where hooks fire, and each update's gradient."""

    def __init__(self) -> None:
        self.trainer: TorchTrainer | None = None
        self.forwards = 0
        self.gradients: list[dict[str, torch.Tensor]] = []

    def before_forward(self, run: Run, value: Batch, event: ForwardEvent) -> Batch:
        self.forwards += 1
        return value

    def before_optimizer_step(self, run: Run, event: OptimizerEvent) -> None:
        assert self.trainer is not None
        found = self.trainer.learner.optimizer.gradients()
        self.gradients.append({name: gradient.clone() for name, gradient in found.items()})


def trainer_of(ranks: Ranks, learner: LearnerName = "policy", **settings: Any) -> TorchTrainer:
    """``eps`` so large that AdamW does not blow up rounding of gradients near zero."""
    outputs = BOTH if learner == "critic" else frozenset({"logprobs"})
    run = tiny_run(sampling=SamplingSection(temperature=0.7))
    watch = Watch()
    run.stack.add_callback(watch, "watch")
    own = {"lr": 1e-2, "eps": 1e-2, "device": "cpu", "tokens_per_micro_batch": BUDGET, "weight_decay": 0.1}
    critic = {"lr": 1e-2} if "values" in outputs else {}
    config = TrainerConfig(**{**own, "critic": critic, **settings})
    watch.trainer = TorchTrainer(config, TrainerSetup(banning(), run, outputs, ranks, learner))
    return watch.trainer


def watch_of(trainer: TorchTrainer) -> Watch:
    found = trainer.run.stack.callbacks["watch"]
    assert isinstance(found, Watch)
    return found


def step(trainer: TorchTrainer, number: int, cuts: Sequence[Cut], algorithm: Algorithm) -> StepResult:
    async def plan() -> AsyncIterator[Cut]:
        for cut in cuts:
            yield cut

    return asyncio.run(trainer.step(number, plan() if trainer.ranks.first else None, algorithm))


def grpo() -> Grpo:
    return Grpo(Grpo.Config())


def steps_of_rows() -> list[list[Cut]]:
    """Two cuts; two updates of two epochs, with old log-probs; a row alone; nothing to learn; a row of weight 0."""
    rows = rows_of_lengths(LENGTHS)
    old = [
        replace(r, columns={**r.columns, "old_logprobs": np.where(r.columns["mask"], -1.2, 0).astype(np.float32)})
        for r in rows
    ]
    unused = replace(rows[2], columns={**rows[2].columns, "weight": 0.0, "units": 0.0})
    zero = [replace(r, columns={**r.columns, "advantages": 0 * r.columns["advantages"]}) for r in rows[:3]]
    return [
        [Cut(rows[:6], False), Cut(rows[6:], True)],
        [Cut(old[:5], True), Cut(old[5:], True), Cut(old[:5], True), Cut(old[5:], True)],
        [Cut([rows[4]], True)],
        [Cut(zero, True)],
        [Cut([unused, rows[7]], False), Cut((), True)],
    ]


def trained(trainer: TorchTrainer, algorithm: Algorithm) -> dict[str, Any]:
    """What comes of all steps."""
    first = {"budget": trainer.budget, "forward": None, "before": weights(trainer)}
    results = [step(trainer, number, cuts, algorithm) for number, cuts in enumerate(steps_of_rows())]
    asked = VALUES if "values" in algorithm.outputs else frozenset({"logprobs", "entropy"})
    rows = [*rows_of_lengths(LENGTHS), row("none/0", [5], [6], mask=[0])]
    columns = asyncio.run(trainer.forward(rows if trainer.ranks.first else [], asked))
    return {
        **first,
        "forward": [{k: np.asarray(v) for k, v in found.items()} for found in columns],
        "results": [(dict(r.metrics), r.updates, r.skipped, list(r.cuts)) for r in results],
        "weights": weights(trainer),
        "gradients": watch_of(trainer).gradients,
        "hooks": trainer.ranks.gather((watch_of(trainer).forwards, len(watch_of(trainer).gradients))),
    }


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


# --- what the ranks do ------------------------------------------------------------------------------------------------


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in SIZES:
        if rank >= size:
            continue
        ranks = join(rank, size, f"file://{folder}/store-{size}", timeout=40)
        try:
            found[f"grpo {size}"] = trained(trainer_of(ranks), grpo())
            found[f"critic {size}"] = trained(trainer_of(ranks, "critic"), ActorCritic())
            found[f"still {size}"] = trained(trainer_of(ranks, lr=1e-30), grpo())
            found[f"bfloat16 {size}"] = trained(trainer_of(ranks, dtype="bfloat16"), grpo())
            if size == 2:
                found["failed"] = failures(ranks)
                found["followed"] = followed(ranks, folder)
        finally:
            leave()
    if rank == 0:
        torch.save(found, folder / "found.pt")


def failures(ranks: Ranks) -> list[str]:
    """What each rank is told when one of them meets an error; afterwards they train on."""
    trainer, said = trainer_of(ranks), []
    rows = rows_of_lengths([5, 5, 5, 5])
    torn = replace(rows[1], columns={**rows[1].columns, "advantages": np.zeros(2, np.float32)})
    promptless = replace(rows[1], columns={**rows[1].columns, "mask": np.ones(len(rows[1].columns["mask"]), np.int8)})
    cuts = (
        [Cut([rows[0], torn, rows[2], rows[3]], True)],
        [Cut([rows[0], promptless], True)],
        [Cut(rows, False)],
    )
    for number, bad in enumerate(cuts):
        try:
            step(trainer, number, bad, grpo())
        except RelaxError as error:
            said += ranks.gather(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError(f"step {number} went through")
    try:
        asyncio.run(trainer.forward([promptless, *rows[2:]] if ranks.first else [], frozenset({"logprobs"})))
    except RelaxError as error:
        said += ranks.gather(str(error))
    assert step(trainer, 9, [Cut(rows, True)], grpo()).updates == (1 if ranks.first else 0)
    return said


def followed(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Rank 1 follows; values are asked for while a step waits for its rows."""
    trainer = trainer_of(ranks, "critic")
    if not ranks.first:
        asyncio.run(trainer.follow(ActorCritic()))
        return {}
    rows = rows_of_lengths(LENGTHS)

    async def both() -> tuple[StepResult, list[Columns]]:
        asked = asyncio.Event()

        async def plan() -> AsyncIterator[Cut]:
            yield Cut(rows[:5], False)
            await asked.wait()
            yield Cut(rows[5:], True)

        training = asyncio.ensure_future(trainer.step(0, plan(), ActorCritic()))
        await asyncio.sleep(0.1)
        values = await trainer.forward(rows, VALUES)
        asked.set()
        result = await training
        trainer.save(folder / "followed")
        await trainer.sleep()
        with pytest.raises(RelaxError, match="it sleeps"):
            await trainer.forward(rows, VALUES)
        await trainer.wake()
        await trainer.forward(rows, VALUES)
        return result, values

    result, values = asyncio.run(both())
    trainer.release()
    return {"updates": result.updates, "values": [v["values"] for v in values], "sleeps": trainer.sleeps}


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__), folder, timeout=100)
    loaded: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return loaded


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("case", ["grpo", "critic"])
def test_ranks_change_nothing(found: dict[str, Any], case: str, size: int) -> None:
    one, many = found[f"{case} 1"], found[f"{case} {size}"]
    assert many["budget"] == size * one["budget"] == size * BUDGET
    assert len(one["gradients"]) == len(many["gradients"]) >= 7
    assert distance(one["gradients"][0], many["gradients"][0]) < 1e-6
    assert distance(one["weights"], many["weights"]) < 1e-6
    assert distance(one["before"], one["weights"]) > 1e-2
    for a, b in zip(one["results"], many["results"], strict=True):
        assert a[1:] == b[1:]
        assert a[0].keys() == b[0].keys()
        twice = {"computed_tokens", "critic_computed_tokens"}  # prompts of split groups are
        for name in a[0].keys() - twice:
            assert math.isclose(a[0][name], b[0][name], rel_tol=2e-5, abs_tol=2e-6), name
    for a, b in zip(one["forward"], many["forward"], strict=True):
        assert a.keys() == b.keys()
        assert all(np.abs(a[name] - b[name]).max() < 1e-4 for name in a)  # of weights that differ by their rounding


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", SIZES[1:])
def test_every_updates_gradient_is_that_of_one_rank(found: dict[str, Any], size: int) -> None:
    """At the same weights: with a learning rate that moves nothing, else rounding grows from update to update."""
    one, many = found["still 1"]["gradients"], found[f"still {size}"]["gradients"]
    assert len(one) == len(many) == 7
    assert max(distance(a, b) for a, b in zip(one, many, strict=True)) < 1e-6
    columns = zip(found["still 1"]["forward"], found[f"still {size}"]["forward"], strict=True)
    assert all(np.abs(a[name] - b[name]).max() < 1e-5 for a, b in columns for name in a)


@pytest.mark.timeout(120)
def test_half_precision_has_its_masters_gradients_summed(found: dict[str, Any]) -> None:
    for size in SIZES[1:]:
        a, b = found["bfloat16 1"]["gradients"][0], found[f"bfloat16 {size}"]["gradients"][0]
        assert distance(a, b) < 0.02
        assert all(t.dtype == torch.float32 for t in b.values())


@pytest.mark.timeout(120)
def test_hooks_fire_on_every_rank(found: dict[str, Any]) -> None:
    hooks = found["grpo 2"]["hooks"]
    assert all(forwards > 0 for forwards, _ in hooks)
    assert [updates for _, updates in hooks] == [len(found["grpo 2"]["gradients"])] * 2


@pytest.mark.timeout(120)
def test_an_error_of_one_rank_is_everyones(found: dict[str, Any]) -> None:
    torn, torn_there, promptless, promptless_there, open_plan, open_there, forward, there = found["failed"]
    assert torn == torn_there and torn.startswith("DataError: row g1/1: its column 'advantages' has shape (2,)")
    assert promptless.startswith("DataError: row g1/1: its first token is a sampled one")
    assert "rank 0 ended the step: DataError: row g1/1" in promptless_there
    assert open_plan.startswith("RelaxError: trainer: the plan of step 2 ended within an update")
    assert "rank 0 ended the step" in open_there
    assert forward.startswith("row g1/1: its first token") and forward in there


@pytest.mark.timeout(120)
def test_a_rank_follows_whatever_rank_0_is_asked(found: dict[str, Any]) -> None:
    followed = found["followed"]
    assert followed["updates"] == 1 and followed["sleeps"] == 1
    assert [len(values) for values in followed["values"]] == [
        len(r.columns["tokens"]) for r in rows_of_lengths(LENGTHS)
    ]


def test_an_error_that_only_says_data_keeps_its_type() -> None:
    from relax_core.torch.ranks import portable

    assert portable(DataError("row x"), 1).args == ("row x",)
    assert str(portable(ValueError("odd\nlines"), 3)) == "trainer rank 3: ValueError: odd lines"


if __name__ == "__main__":
    fork_ranks(4, lambda rank: main(rank, Path(sys.argv[1])))
