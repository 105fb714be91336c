"""How far the engine's policy is from the trainer's, and what was clipped, by modality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_core.interfaces import Batch, Cut, Loss, Outputs, Row
from relax_core.testing.gradients import (
    caught,
    rows_of_lengths,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import forward, row, tiny_run, tiny_trainer, train, train_cuts
from relax_core.torch.trainer import TorchTrainer
from relax_core.types import MediaRef


def grpo(entropy: float | None = None, **settings: Any) -> Grpo:
    bonus = None if entropy is None else EntropyBonus(start=entropy, end=entropy, steps=1)
    return Grpo(Grpo.Config(entropy=bonus, **settings))


def test_mismatch_compares_with_the_engine_by_modality() -> None:
    trainer = tiny_trainer()
    rows = [row("g/0", [5, 6], [7, 1]), row("g/1", [5, 6, 9], [8, 7, 1])]
    own = forward(trainer, rows)
    shifted = [
        replace(r, columns={**r.columns, "logprobs": np.where(r.columns["mask"], o["logprobs"] - d, np.nan)})
        for r, o, d in zip(rows, own, (0.1, -0.2), strict=True)
    ]
    metrics = train(trainer, 0, [shifted], grpo()).metrics
    assert metrics["mismatch/abs"] == pytest.approx((2 * 0.1 + 3 * 0.2) / 5, abs=1e-5)
    k3 = [math.expm1(d) - d for d in (0.1, -0.2)]
    assert metrics["mismatch/k3"] == pytest.approx((2 * k3[0] + 3 * k3[1]) / 5, abs=1e-5)
    assert metrics["mismatch/text/abs"] == metrics["mismatch/abs"]


def off_by(trainer: TorchTrainer, rows: Sequence[Row], distances: Sequence[float], old: bool = False) -> list[Row]:
    """The rows as an engine sampled them whose log-probs are lower by these distances; ``old``: pi_old is the same."""
    made = []
    for r, own, d in zip(rows, forward(trainer, rows), distances, strict=True):
        logprobs = np.where(r.columns["mask"], own["logprobs"] - d, 0).astype(np.float32)
        columns = {**r.columns, "logprobs": logprobs} | ({"old_logprobs": logprobs} if old else {})
        made.append(replace(r, columns=columns))
    return made


def test_with_old_engine_only_the_policy_of_the_steps_start_is_compared() -> None:
    """Four updates of one row each: the batch's old log-probs are the engine's, so later rows would differ by 0."""
    trainer = tiny_trainer(run=tiny_run(old="engine"))
    rows = off_by(trainer, rows_of_lengths([3, 4, 5, 6]), (0.3, 0.2, 0.1, 0.4), old=True)
    result = train_cuts(trainer, 0, [Cut([r], True) for r in rows], grpo())
    assert result.updates == 4
    assert result.metrics["mismatch/abs"] == pytest.approx(0.3, abs=1e-5)
    assert result.metrics["mismatch/text/k3"] == pytest.approx(math.expm1(0.3) - 0.3, abs=1e-5)


def test_with_old_engine_rows_count_until_the_policy_moves() -> None:
    trainer = tiny_trainer(run=tiny_run(old="engine"))
    rows = off_by(trainer, rows_of_lengths([3, 4, 5]), (0.3, 0.2, 0.1), old=True)
    rows[0] = replace(rows[0], columns={**rows[0].columns, "advantages": 0 * rows[0].columns["advantages"]})
    result = train_cuts(trainer, 0, [Cut([r], True) for r in rows], grpo())
    assert (result.updates, result.skipped) == (2, 1)
    assert result.metrics["mismatch/abs"] == pytest.approx((3 * 0.3 + 4 * 0.2) / 7, abs=1e-5)


def test_with_recomputed_old_logprobs_every_row_is_compared_once() -> None:
    trainer = caught()
    rows = off_by(trainer, rows_of_lengths([3, 4]), (0.3, 0.2))
    rows = [
        replace(r, columns={**r.columns, "old_logprobs": o["logprobs"]})
        for r, o in zip(rows, forward(trainer, rows), strict=True)
    ]
    result = train_cuts(trainer, 0, [Cut([r], True) for r in rows] * 2, grpo())  # two epochs
    assert result.updates == 4
    assert result.metrics["mismatch/abs"] == pytest.approx((3 * 0.3 + 4 * 0.2) / 7, abs=1e-5)


class Clipping(Grpo):
    """Says that the tokens 7 were clipped; and, which must not count, every token that is not sampled."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        return replace(super().loss(batch, outputs), clipped_BT=(batch.tokens_BT == 7) | ~batch.mask_BT)


def test_the_clipped_share_is_counted_by_modality() -> None:
    adapter = tiny_adapter(images=True)
    adapter.media.features("a", lambda: {"colour": np.zeros(3, np.float32)})
    rows = [
        row("g/0", [5, 3], [7, 7, 8, 7], mask=[1, 0, 1, 1], media=[MediaRef("image", "a", 1, 1)]),  # 2 of 3
        row("h/0", [5, 6], [7, 8, 9, 10]),  # 1 of 4
        row("h/1", [5, 6], [8]),  # 0 of 1
    ]
    for cuts in ([rows], [rows[:1], rows[1:]]):
        metrics = train(tiny_trainer(adapter), 0, cuts, Clipping(Grpo.Config())).metrics
        assert metrics["mismatch/clipped"] == pytest.approx(3 / 8)
        assert metrics["mismatch/image/clipped"] == pytest.approx(2 / 3)
        assert metrics["mismatch/text/clipped"] == pytest.approx(1 / 5)


def test_the_clipped_share_is_over_all_updates() -> None:
    first, second = row("h/0", [5, 6], [7, 8, 9]), row("h/1", [5, 6], [7])
    metrics = train_cuts(tiny_trainer(), 0, [Cut([first], True), Cut([second], True)], Clipping(Grpo.Config())).metrics
    assert metrics["mismatch/clipped"] == metrics["mismatch/text/clipped"] == pytest.approx(2 / 4)


def test_a_step_with_a_trained_token_has_every_mismatch_metric() -> None:
    class Silent(Grpo):
        def loss(self, batch: Batch, outputs: Outputs) -> Loss:
            return replace(super().loss(batch, outputs), clipped_BT=None)

    metrics = train(tiny_trainer(), 0, [[row("g/0", [5], [7])]], Silent(Grpo.Config())).metrics
    assert {f"mismatch/{kind}{name}" for kind in ("", "text/") for name in ("abs", "k3", "clipped")} <= metrics.keys()
    assert metrics["mismatch/clipped"] == 0
