"""The conformance checks catch what they are for: each algorithm here breaks one promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from relax_algorithms import ops
from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Algorithm, Batch, Columns, Loss, Outputs, ScoredGroup, Streaming
from relax_core.testing import algorithm_checks as checks


class Plain(Grpo):
    """-A log p, the simplest right policy gradient."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        mask_BT = ops.trained(batch)
        loss_BT = -ops.masked(outputs.logprobs_BT, mask_BT) * ops.masked(batch.advantages_BT, mask_BT)
        return Loss(ops.aggregate(loss_BT, batch), {"logprob": ops.masked_sum(outputs.logprobs_BT, mask_BT)})


class MeanOfMicroBatch(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        loss = super().loss(batch, outputs)
        return replace(loss, total=loss.total / batch.mask_BT.sum().clamp(min=1))


class PaddedWidth(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        loss = super().loss(batch, outputs)
        return replace(loss, total=loss.total / batch.mask_BT.shape[1])


class MaskByMultiplying(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        total = -(outputs.logprobs_BT * batch.advantages_BT * batch.mask_BT * batch.weight_B[:, None]).sum()
        return Loss(total, {})


class CountsUntrained(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        loss = super().loss(batch, outputs)
        return replace(loss, metrics={"logprob": ops.masked_sum(outputs.logprobs_BT, batch.mask_BT)})


class MeanMetric(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        loss = super().loss(batch, outputs)
        total, count = loss.metrics["logprob"]
        return replace(loss, metrics={"logprob": (total / count, count / count)})


class Doubled(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        return super().loss(batch, replace(outputs, logprobs_BT=2 * outputs.logprobs_BT))


class AttachedMetric(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        loss = super().loss(batch, outputs)
        return replace(loss, metrics={"loss": (loss.total, batch.units_B.sum())})


class Whitened(Plain):
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        made = super().advantages(groups)
        scale = np.float32(np.std(np.concatenate([columns["advantages"] for columns in made.values()])))
        return {row: {**columns, "advantages": columns["advantages"] / scale} for row, columns in made.items()}


class WhitenedAndSaysSo(Whitened):
    streaming = Streaming.BATCH


class Everywhere(Plain):
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return {
            row: {**columns, "advantages": np.full_like(columns["advantages"], columns["advantages"][-1])}
            for row, columns in super().advantages(groups).items()
        }


class Double(Plain):
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        made = super().advantages(groups)
        return {row: {**c, "advantages": c["advantages"].astype(np.float64)} for row, c in made.items()}


class ForgetsRows(Plain):
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        made = super().advantages(groups)
        return {row: columns for row, columns in made.items() if columns["weight"]}


class TrainsAbstentions(Plain):
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return {row: {**columns, "weight": 1.0} for row, columns in super().advantages(groups).items()}


@pytest.mark.parametrize("algorithm", [Plain, WhitenedAndSaysSo])
def test_right_ones_pass(algorithm: type[Grpo]) -> None:
    checks.check_algorithm(algorithm(Grpo.Config()))


def test_another_gradient_passes_where_it_is_meant() -> None:
    checks.check_algorithm(Doubled(Grpo.Config()), policy_gradient=False)


@pytest.mark.parametrize(
    ("algorithm", "check", "message"),
    [
        (MeanOfMicroBatch, checks.check_cuts, "micro-batches of 1 rows: the loss"),
        (PaddedWidth, checks.check_cuts, "micro-batches of 1 rows: the loss"),
        (MeanMetric, checks.check_cuts, "micro-batches of 1 rows: metric logprob"),
        (MaskByMultiplying, checks.check_masked, "inf at masked tokens: the loss|a masked token gets a gradient"),
        (CountsUntrained, checks.check_untrained, "without the untrained rows: metric logprob"),
        (AttachedMetric, checks.check_cuts, "metric loss is not detached"),
        (Doubled, checks.check_ratio_one, "at ratio 1"),
        (Whitened, checks.check_streaming, "advantages depends on other groups"),
        (Everywhere, checks.check_columns, "an advantage is not 0 where mask is 0"),
        (Double, checks.check_columns, "not float32"),
        (ForgetsRows, checks.check_columns, "must cover exactly the rows"),
        (TrainsAbstentions, checks.check_columns, "nothing to train"),
    ],
)
def test_broken_ones_are_caught(algorithm: type[Grpo], check: Callable[[Algorithm], None], message: str) -> None:
    broken = algorithm(Grpo.Config())
    with pytest.raises(AssertionError, match=message):
        check(broken)
    with pytest.raises(AssertionError):
        checks.check_algorithm(broken)
