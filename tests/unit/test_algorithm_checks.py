"""The conformance checks catch what they are for: each algorithm here breaks one promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_algorithms import ops
from relax_algorithms.grpo import Grpo
from relax_algorithms.terms import Terms
from relax_core.interfaces import Algorithm, Batch, Columns, Loss, Outputs, Row, ScoredGroup, Streaming
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
        scale = np.float32(np.std(np.concatenate([c["advantages"] for c in made.values() if c["weight"]])))
        return {row: {**columns, "advantages": columns["advantages"] / scale} for row, columns in made.items()}


class WhitenedAndSaysSo(Whitened):
    streaming = Streaming.BATCH


class WhitenedOverUntrained(Plain):
    streaming = Streaming.BATCH

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        made = super().advantages(groups)
        scale = np.float32(np.std(np.concatenate([c["advantages"] for c in made.values()])))
        return {row: {**columns, "advantages": columns["advantages"] / scale} for row, columns in made.items()}


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


class Sequences(Plain):
    """A ratio of whole trajectories, which a cut within one would change."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        terms = Terms.of(batch, outputs)
        ratio_BT = terms.sequence_mean(terms.log_ratio_BT).exp().expand_as(terms.ratio_BT)
        return Loss(ops.aggregate(-ratio_BT.detach() * terms.log_ratio_BT * terms.advantages_BT, batch), {})


class Distilled(Plain):
    """Reverse KL to the teacher over its likeliest tokens and over the whole vocabulary."""

    needs = frozenset({"topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs"})
    outputs = frozenset({"logprobs", "topk_logprobs", "full_logprobs"})

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert outputs.topk_logprobs_BTK is not None and outputs.full_logprobs_BTV is not None
        mask_BT1 = ops.trained(batch)[..., None]
        loss_BT = torch.zeros(batch.mask_BT.shape)
        for mine, teacher in (
            (outputs.topk_logprobs_BTK, batch.columns["teacher_topk_logprobs"]),
            (outputs.full_logprobs_BTV, batch.columns["teacher_full_logprobs"]),
        ):
            p, q = self.clean(mine, mask_BT1), self.clean(teacher, mask_BT1)
            loss_BT = loss_BT + (p.exp() * (p - q)).sum(-1)
        return Loss(ops.aggregate(loss_BT, batch), {"kl": ops.masked_sum(loss_BT, ops.trained(batch))})

    def clean(self, values: torch.Tensor, mask_BT1: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT1, values, 0.0)


class DistilledByMultiplying(Distilled):
    def clean(self, values: torch.Tensor, mask_BT1: torch.Tensor) -> torch.Tensor:
        return values * mask_BT1


class Critic(Plain):
    """Beside the policy's gradient one of the values, towards a column of its own."""

    needs = frozenset({"values"})
    outputs = frozenset({"logprobs", "values"})
    makes = frozenset({"returns"})

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        made = super().advantages(groups)
        values = {row.id: row.columns["values"] for group in groups for m in group.members for row in m.rows}
        return {row: {**columns, "returns": columns["advantages"] + values[row]} for row, columns in made.items()}

    def value_loss(self, batch: Batch, values_BT: Tensor) -> Loss:
        error_BT = ops.masked(values_BT - batch.columns["returns"], ops.trained(batch)).square()
        return Loss(ops.aggregate(error_BT, batch), {})


class MakesWhatItDoesNotSay(Critic):
    makes = frozenset()


class Prepares(Plain):
    """Leaves out the tokens that the step finds least likely."""

    needs = frozenset({"old_logprobs"})

    def prepare(self, rows: Sequence[Row]) -> Mapping[str, Columns]:
        lowest = min(row.columns["old_logprobs"][row.columns["mask"] > 0].min(initial=0) for row in rows)
        return {row.id: {"keep": np.float32(row.columns["old_logprobs"] > lowest)} for row in rows}

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.old_logprobs_BT is not None
        mask_BT = ops.trained(batch)
        loss_BT = -ops.masked(outputs.logprobs_BT, mask_BT) * ops.masked(batch.advantages_BT, mask_BT)
        return Loss(ops.aggregate(loss_BT * ops.masked(batch.columns["keep"], mask_BT), batch), {})


class LooksAhead(Plain):
    """When advantages are made, old log-probs are not known yet."""

    needs = frozenset({"old_logprobs"})

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        assert all("old_logprobs" in row.columns for g in groups for m in g.members for row in m.rows), (
            "no old_logprobs"
        )
        return super().advantages(groups)


class DividesByZero(Plain):
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        made = super().advantages(groups)
        for group in groups:
            deviation = np.float32(np.std([m.reward for m in group.members if m.reward is not None] or [0.0]))
            for row in (row for member in group.members for row in member.rows):
                with np.errstate(all="ignore"):
                    made[row.id]["advantages"][row.columns["mask"] > 0] /= deviation
        return made


class Overflows(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        assert batch.old_logprobs_BT is not None
        mask_BT = ops.trained(batch)
        ratio_BT = ops.masked(outputs.logprobs_BT - batch.old_logprobs_BT, mask_BT).exp()
        return Loss(ops.aggregate(-ratio_BT * ops.masked(batch.advantages_BT, mask_BT), batch), {})


class Couples(Plain):
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        longest = ops.trained(batch).sum(-1).max().clamp(min=9)  # of the examples, whole or in parts: 9
        loss = super().loss(batch, outputs)
        return replace(loss, total=loss.total / longest)


@pytest.mark.parametrize("algorithm", [Plain, WhitenedAndSaysSo, Sequences, Critic])
def test_right_ones_pass(algorithm: type[Grpo]) -> None:
    checks.check_algorithm(algorithm(Grpo.Config()))


@pytest.mark.parametrize("algorithm", [Doubled, Distilled, Prepares])
def test_another_gradient_passes_where_it_is_meant(algorithm: type[Grpo]) -> None:
    checks.check_algorithm(algorithm(Grpo.Config()), policy_gradient=False)
    with pytest.raises(AssertionError, match="at ratio 1"):
        checks.check_algorithm(algorithm(Grpo.Config()))


@pytest.mark.parametrize(
    ("algorithm", "check", "message"),
    [
        (MeanOfMicroBatch, checks.check_cuts, "micro-batches of 1 trajectories: the loss"),
        (PaddedWidth, checks.check_cuts, "micro-batches of 1 trajectories: the loss"),
        (MeanMetric, checks.check_cuts, "micro-batches of 1 trajectories: metric logprob"),
        (MaskByMultiplying, checks.check_masked, "inf at masked tokens: the loss|a masked token gets a gradient"),
        (CountsUntrained, checks.check_untrained, "without the untrained rows: metric logprob"),
        (AttachedMetric, checks.check_cuts, "metric loss is not detached"),
        (Doubled, checks.check_ratio_one, "at ratio 1"),
        (Whitened, checks.check_streaming, "advantages depends on other groups"),
        (Everywhere, checks.check_columns, "an advantage is not 0 where mask is 0"),
        (Double, checks.check_columns, "not float32"),
        (ForgetsRows, checks.check_columns, "must cover exactly the rows"),
        (TrainsAbstentions, checks.check_columns, "nothing to train"),
        (MakesWhatItDoesNotSay, checks.check_columns, "has the columns .*'returns'.*, not "),
        (LooksAhead, checks.check_columns, "no old_logprobs"),
        (DistilledByMultiplying, checks.check_masked, "inf at masked tokens: |a masked token gets a gradient"),
        (DividesByZero, checks.check_awkward, "a number of advantages is not finite"),
        (Overflows, checks.check_awkward, "tokens that the other policies find impossible: the loss is nan"),
        (Couples, checks.check_awkward, "one token among long responses, each trajectory alone: the loss"),
        (WhitenedOverUntrained, checks.check_awkward, "advantages changes beside a group without a reward"),
    ],
)
def test_broken_ones_are_caught(algorithm: type[Grpo], check: Callable[[Algorithm], None], message: str) -> None:
    broken = algorithm(Grpo.Config())
    with pytest.raises(AssertionError, match=message):
        check(broken)
    with pytest.raises(AssertionError):
        checks.check_algorithm(broken)


# --- examples ---------------------------------------------------------------------------------------------------------


def test_examples_agree_with_each_other() -> None:
    """A policy's log-probs are those of one distribution, and the teacher's candidates its likeliest tokens."""
    needs = frozenset({"teacher_logprobs", "topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs", "values"})
    group = checks.scored_group("a", [(1.0, [".##.#<>~"]), (0.0, ["..."])], needs)
    c, empty = (member.rows[0].columns for member in group.members)
    sampled = c["mask"] > 0
    assert c["topk_ids"].shape == (6, 3) and c["teacher_full_logprobs"].shape == (6, 52)
    assert empty["topk_ids"].shape == (0, 3) and empty["teacher_full_logprobs"].shape == (0, 52)
    tokens = c["tokens"][sampled][:, None]
    for who in ("policy", "teacher"):
        full, topk = c[f"{who}_full_logprobs"], c[f"{who}_topk_logprobs"]
        np.testing.assert_allclose(np.exp(full, dtype=np.float64).sum(-1), 1, atol=1e-5)
        assert (np.take_along_axis(full, tokens, -1)[:, 0] == c[f"{who}_logprobs"][sampled]).all()
        assert (np.take_along_axis(full, c["topk_ids"], -1) == topk).all()
        assert (full[:, 50:] == -1e30).all()
    assert all(len(set(ids)) == 3 for ids in c["topk_ids"].tolist())
    assert (c["teacher_topk_logprobs"][:, 0] == c["teacher_full_logprobs"].max(-1)).all()
    far = {name: (c[name][sampled] < -20).tolist() for name in ("policy_logprobs", "old_logprobs", "logprobs")}
    assert far["policy_logprobs"] == [False, False, False, True, False, False]
    assert far["old_logprobs"] == [False, False, False, False, True, False]
    assert far["logprobs"] == [False, False, False, False, True, True]


def test_micro_batches_hold_whole_trajectories() -> None:
    rows = checks.example_rows(Plain(Grpo.Config()))
    found = [[row.id for row in cut] for cut in checks.cuts(rows, 2)]
    assert found[0] == ["task-0/0/0", "task-0/1/0", "task-0/1/1"]
    assert [id for cut in found for id in cut] == [row.id for row in rows]


def test_wide_columns_stand_at_the_sampled_tokens() -> None:
    rows = checks.example_rows(Distilled(Grpo.Config()))[:2]
    batch = checks.make_batch(rows, garbage=-7.0, padding=1)
    assert batch.columns["topk_ids"].dtype == torch.int64
    for name, garbage in (("topk_ids", 0), ("teacher_topk_logprobs", -7.0)):
        for i, row in enumerate(rows):
            assert batch.columns[name][i][batch.mask_BT[i]].tolist() == row.columns[name].tolist()
            assert (batch.columns[name][i][~batch.mask_BT[i]] == garbage).all()


def test_rewards_by_name_count_with_their_sum() -> None:
    (one, none) = checks.scored_group("a", [({"x": 1.0, "y": None, "z": 0.5}, ["#"]), ({"x": None}, ["#"])]).members
    assert one.reward == 1.5 and none.reward is None and one.rewards["y"] is None
