"""Optimizer updates of the embedded trainer: taken, skipped, repeated, saved and restored."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_core.errors import CheckpointError, RelaxError
from relax_core.interfaces import Cut
from relax_core.testing.gradients import (
    Catch,
    assert_close,
    caught,
    gradients,
    rows_of_lengths,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import forward, row, tiny_trainer, train, train_cuts
from relax_core.torch.trainer import TorchTrainer


def grpo(entropy: float | None = None, **settings: Any) -> Grpo:
    bonus = None if entropy is None else EntropyBonus(start=entropy, end=entropy, steps=1)
    return Grpo(Grpo.Config(entropy=bonus, **settings))


# --- updates ----------------------------------------------------------------------------------------------------------


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def unchanged(trainer: TorchTrainer, before: dict[str, torch.Tensor], state: dict[str, Any]) -> bool:
    now = trainer.learner.optimizer.state()["state"]
    same_state = now.keys() == state.keys() and all(
        torch.equal(now[k][n], state[k][n]) for k in state for n in state[k]
    )
    return same_state and all(torch.equal(t, before[n]) for n, t in trainer.weights())


def copied(trainer: TorchTrainer) -> dict[str, Any]:
    state = trainer.learner.optimizer.state()["state"]
    return {k: {n: t.clone() for n, t in values.items()} for k, values in state.items()}


@pytest.mark.parametrize("case", ["empty", "untrained", "zero"])
def test_an_update_without_anything_to_learn_is_skipped(case: str) -> None:
    trainer = tiny_trainer(weight_decay=0.1)
    rows = rows_of_lengths([3, 4])
    train(trainer, 0, [rows], grpo())
    before, state = weights(trainer), copied(trainer)
    if case == "empty":
        rows = []
    elif case == "untrained":
        rows = [replace(r, columns={**r.columns, "weight": 0.0, "units": 0.0}) for r in rows]
    else:
        rows = [replace(r, columns={**r.columns, "advantages": 0 * r.columns["advantages"]}) for r in rows]
    result = train(trainer, 1, [rows], grpo())
    assert (result.updates, result.skipped) == (0, 1)
    assert unchanged(trainer, before, state)
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_zero_advantages_with_an_entropy_bonus_still_train() -> None:
    rows = [row("g/0", [5, 6], [7, 1], advantage=0.0)]
    assert train(tiny_trainer(), 0, [rows], grpo(entropy=0.1)).updates == 1


def test_a_gradient_that_is_not_finite_is_skipped_and_then_ends_the_run() -> None:
    trainer = tiny_trainer(max_nonfinite=2)
    rows = rows_of_lengths([3, 4])
    bad = [
        replace(rows[0], columns={**rows[0].columns, "advantages": np.full_like(rows[0].columns["advantages"], np.nan)})
    ]
    train(trainer, 0, [rows], grpo())
    before, state = weights(trainer), copied(trainer)
    result = train(trainer, 1, [bad], grpo())
    assert (result.updates, result.skipped, result.metrics["nonfinite"]) == (0, 1, 1)
    assert unchanged(trainer, before, state)
    assert all(math.isfinite(v) for v in result.metrics.values())
    assert train(trainer, 2, [rows], grpo()).updates == 1  # and the count starts again
    train(trainer, 3, [bad], grpo())
    with pytest.raises(
        RelaxError, match=r"trainer.max_nonfinite: the gradient norm of 2 updates in a row was nan \(step 4\)"
    ):
        train(trainer, 4, [bad], grpo())


def test_several_updates_in_a_step_are_several_optimizer_steps() -> None:
    trainer, rows = caught(), rows_of_lengths([3, 4, 5, 6])
    cuts = [Cut(rows[:1], False), Cut(rows[1:2], True), Cut(rows[2:], True)]
    result = train_cuts(trainer, 0, cuts, grpo())
    assert (result.updates, result.skipped) == (2, 0)
    assert result.cuts == [(["g0/0"], False), (["g1/1"], True), (["g2/2", "g0/3"], True)]
    events = cast(Catch, trainer.run.stack.callbacks["catch"]).events
    assert [(e.step, e.update) for e in events] == [(0, 0), (0, 1)]
    one = caught()
    train(one, 0, [rows[:1], rows[1:2]], grpo())
    train(one, 0, [rows[2:]], grpo())
    assert all(torch.equal(t, weights(one)[n]) for n, t in trainer.weights())


def test_a_plan_must_end_with_an_update() -> None:
    with pytest.raises(RelaxError, match="the plan of step 3 ended within an update"):
        train_cuts(tiny_trainer(), 3, [Cut(rows_of_lengths([3]), False)], grpo())


def test_clipping_scales_the_gradient_to_its_limit() -> None:
    rows = rows_of_lengths([3, 4])
    free, bound = caught(), caught(clip=0.01)
    norm = train(free, 0, [rows], grpo()).metrics["grad_norm"]
    assert train(bound, 0, [rows], grpo()).metrics["grad_norm"] == norm > 0.01
    expected = {n: g * (0.01 / norm) for n, g in gradients(free).items()}
    assert_close(gradients(bound), expected, 1e-4)


def test_equal_work_gives_equal_bits() -> None:
    rows = rows_of_lengths([3, 1, 9, 4, 2, 6])
    ends = []
    for _ in range(2):
        trainer = tiny_trainer()
        results = [train(trainer, step, [rows[:3], rows[3:]], grpo(entropy=0.01)) for step in range(3)]
        ends.append((weights(trainer), [r.metrics for r in results]))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(t, ends[1][0][n]) for n, t in ends[0][0].items())


def test_training_raises_the_reward() -> None:
    """Rows that end with token 7 are good, the others are bad: its log-prob must rise."""
    trainer = tiny_trainer(lr=3e-3)
    good, bad = row("g/0", [5, 6], [7, 1], advantage=1.0), row("g/1", [5, 6], [8, 1], advantage=-1.0)
    before = forward(trainer, [good, bad])
    for step in range(5):
        train(trainer, step, [[good, bad]], grpo())
    after = forward(trainer, [good, bad])
    assert after[0]["logprobs"][2] > before[0]["logprobs"][2] + 0.5
    assert after[1]["logprobs"][2] < before[1]["logprobs"][2] - 0.5


# --- weights and checkpoints ------------------------------------------------------------------------------------------


def test_weights_have_hugging_face_names_and_tied_ones_come_once() -> None:
    trainer = tiny_trainer()
    names = [name for name, _ in trainer.weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == len(dict(trainer.learner.module.named_parameters()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_trainer_continues_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01}
    rows = rows_of_lengths([3, 1, 9, 4, 2, 6])
    through = tiny_trainer(**settings)
    for step in range(4):
        through_result = train(through, step, [rows[:3], rows[3:]], grpo())
        if step == 1:
            through.save(tmp_path)
    resumed = tiny_trainer(**settings)
    resumed.load(tmp_path)
    for step in (2, 3):
        result = train(resumed, step, [rows[:3], rows[3:]], grpo())
    assert result.metrics == through_result.metrics
    assert all(torch.equal(t, weights(resumed)[n]) for n, t in through.weights())
    assert all(
        torch.equal(t, resumed.learner.optimizer.masters()[n]) for n, t in through.learner.optimizer.masters().items()
    )


def test_a_checkpoint_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"weights.safetensors: 'model.embed_tokens.weight' has shape \(32, 32\)"):
        tiny_trainer(tiny_adapter("a b c")).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model.layers.2.input_layernorm.weight' is missing in the checkpoint"):
        tiny_trainer(tiny_adapter(layers=3)).load(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load(tmp_path)
