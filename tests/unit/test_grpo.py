"""GRPO as a whole: settings, advantages and loss by hand, and that no cut of the batch changes its gradient.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from relax_algorithms import ops
from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_algorithms.plugin import relax_algorithms
from relax_algorithms.testing import aggregations
from relax_core.interfaces import Batch, Outputs, Row
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, make_batch, scored_group
from relax_core.testing.training import tiny_config

NAN = math.nan
AGGREGATIONS = aggregations()
SETTINGS: list[dict[str, Any]] = [
    *AGGREGATIONS,
    {"clip_high": 0.28, "dual_clip": 1.3},
    {"entropy": {"start": 0.1, "end": 0.01, "steps": 10}},
]


def grpo(**settings: Any) -> Grpo:
    return Grpo(Grpo.Config.model_validate(settings))


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_group_of_one_is_refused() -> None:
    (line,) = Grpo.check(Grpo.Config(), tiny_config("grpo", group_size=1))
    assert "group_size is 1" in line and "2 or more" in line
    assert not list(Grpo.check(Grpo.Config(), tiny_config("grpo", group_size=2)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"aggregation": "constant"}, "constant is None"),
        ({"aggregation": "token-mean", "constant": 9}, "constant is 9"),
        ({"aggregation": "constant", "constant": 0}, "constant"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"entropy": {"start": 0.1, "end": 0.01}}, "entropy.steps"),
        ({"entropy": {"start": -0.1, "end": 0.01, "steps": 5}}, "entropy.start"),
        ({"clip": 0.2}, "clip"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        grpo(**settings)


def test_entropy_is_computed_only_for_the_bonus() -> None:
    assert grpo().outputs == {"logprobs"}
    assert grpo(entropy={"start": 0.1, "end": 0.1, "steps": 1}).outputs == {"logprobs", "entropy"}
    assert grpo().outputs == {"logprobs"}


def test_entropy_annealing() -> None:
    falling = EntropyBonus(start=0.15, end=0.02, steps=400)
    assert [falling.at(step) for step in (0, 200, 399, 400, 9999)] == pytest.approx([0.15, 0.085, 0.020325, 0.02, 0.02])
    rising = EntropyBonus(start=0.0, end=0.1, steps=10)
    assert [rising.at(step) for step in (0, 1, 10, 11)] == pytest.approx([0, 0.01, 0.1, 0.1])


def test_all_but_the_loss_works_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from relax_algorithms.grpo import Grpo
from relax_algorithms.plugin import relax_algorithms
relax_algorithms()["grpo"], Grpo.Config.model_json_schema(), Grpo.check
print("numpy" in sys.modules)
from relax_core.testing.algorithm_checks import check_columns
check_columns(Grpo(Grpo.Config()))
try:
    import relax_algorithms.ops
except ImportError:
    print("blocked")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "blocked"], done.stderr


def test_the_suite_offers_it() -> None:
    assert relax_algorithms()["grpo"].target == f"{Grpo.__module__}:{Grpo.__qualname__}"


# --- advantages and loss by hand --------------------------------------------------------------------------------------


def test_advantages() -> None:
    """Rewards 1 and 0: deviation 0.5, standard deviation sqrt(0.5)."""
    groups = [scored_group("a", [(1.0, [".##"]), (0.0, [".#", ".#.#"]), (None, ["#"])])]
    made = grpo(aggregation="sequence-mean").advantages(groups)
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert made["a/0/0"]["advantages"] == pytest.approx([0, half, half])
    assert made["a/1/1"]["advantages"] == pytest.approx([0, -half, 0, -half])
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1 / 2, 1), (1 / 3, 1), (1 / 3, 0), (0, 0)]


def by_hand(step: int = 0) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Ratios 1.5, 0.5, 1.5, 0.5 at advantages 1, 1, -1, -1, then a masked token; entropies 1, 2, 3, 4."""
    ratio_BT = torch.tensor([[1.5, 0.5, 1.5, 0.5, NAN]])
    old_BT = torch.tensor([[-2.0, -2.0, -2.0, -2.0, NAN]])
    batch = Batch(
        step=step,
        tokens_BT=torch.zeros(1, 5, dtype=torch.long),
        mask_BT=torch.tensor([[True, True, True, True, False]]),
        logprobs_BT=old_BT - 0.1,
        old_logprobs_BT=old_BT,
        advantages_BT=torch.tensor([[1.0, 1.0, -1.0, -1.0, NAN]]),
        weight_B=torch.tensor([0.5]),
        units_B=torch.tensor([1.0]),
        sequence_B=torch.tensor([0]),
    )
    entropy_BT = torch.tensor([[1.0, 2.0, 3.0, 4.0, NAN]], requires_grad=True)
    return batch, (old_BT + ratio_BT.log()).requires_grad_(), entropy_BT


def test_loss() -> None:
    """Token losses -1.2 (clipped), -0.5, 1.5, 0.8 (clipped), times the weight 0.5."""
    batch, logprobs_BT, _ = by_hand()
    loss = grpo().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * 0.6)
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([0, -0.5 * 0.5, 0.5 * 1.5, 0, 0])
    wider = grpo(clip_high=0.28).loss(batch, Outputs(logprobs_BT))
    assert wider.total.item() == pytest.approx(0.5 * (0.6 - 0.08))
    bounded = grpo(dual_clip=1.25).loss(batch, Outputs(logprobs_BT))
    assert bounded.total.item() == pytest.approx(0.5 * (0.6 - 0.25))


@pytest.mark.parametrize(("step", "coefficient"), [(0, 0.2), (5, 0.15), (10, 0.1), (50, 0.1)])
def test_loss_with_entropy(step: int, coefficient: float) -> None:
    batch, logprobs_BT, entropy_BT = by_hand(step)
    loss = grpo(entropy={"start": 0.2, "end": 0.1, "steps": 10}).loss(batch, Outputs(logprobs_BT, entropy_BT))
    assert loss.total.item() == pytest.approx(0.5 * (0.6 - coefficient * 10))
    (gradient,) = torch.autograd.grad(loss.total, entropy_BT)
    assert gradient.tolist()[0] == pytest.approx([-0.5 * coefficient] * 4 + [0])
    assert [m.item() for m in loss.metrics["entropy"]] == [10, 4]


def test_metrics() -> None:
    batch, logprobs_BT, _ = by_hand()
    metrics = grpo().loss(batch, Outputs(logprobs_BT)).metrics
    assert {name: count.item() for name, (_, count) in metrics.items()} == dict.fromkeys(metrics, 4)
    kl_old = 2 * (1.5 - 1 - math.log(1.5)) + 2 * (0.5 - 1 - math.log(0.5))
    assert {name: total.item() for name, (total, _) in metrics.items()} == pytest.approx(
        {"ratio": 4.0, "clipped": 2.0, "kl_old": kl_old}, abs=1e-5
    )


def test_without_old_logprobs_the_ratio_is_one() -> None:
    """However far the engine was: this step's old policy is the one being trained."""
    update = evaluate(grpo(), example_rows(grpo()), old=False)
    total, count = update.metrics["ratio"]
    assert total == count > 0
    assert update.metrics["kl_old"] == (0, count)


# --- invariance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_keeps_the_promises_of_every_algorithm(settings: dict[str, Any]) -> None:
    check_algorithm(grpo(**settings))


def policy_gradient(algorithm: Grpo, rows: list[Row], size: int) -> tuple[np.ndarray[Any, Any], float]:
    """Gradient and loss of a tiny shared policy, accumulated over micro-batches of ``size``, each of its own width."""
    torch.manual_seed(0)
    policy_TV = torch.randn(9, 50, requires_grad=True)
    units, total = sum(row.columns["units"] for row in rows), 0.0
    for start in range(0, len(rows), size):
        batch = make_batch(rows[start : start + size], step=3, garbage=NAN)
        logprobs_BTV = policy_TV[: batch.mask_BT.shape[1]].log_softmax(-1).expand(len(batch.mask_BT), -1, -1)
        logprobs_BT = logprobs_BTV.gather(-1, batch.tokens_BT[..., None])[..., 0]
        entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
        loss = algorithm.loss(batch, Outputs(logprobs_BT, entropy_BT)).total / units
        loss.backward()
        total += loss.item()
    assert policy_TV.grad is not None
    return policy_TV.grad.numpy(), total


@pytest.mark.parametrize("entropy", [None, {"start": 0.1, "end": 0.05, "steps": 6}], ids=["plain", "entropy"])
@pytest.mark.parametrize("settings", AGGREGATIONS, ids=str)
def test_cuts(settings: dict[str, Any], entropy: dict[str, Any] | None) -> None:
    """Eight sequences of lengths 1 to 8, as one micro-batch of 8, two of 4, four of 2, eight of 1."""
    algorithm = grpo(**settings, entropy=entropy)
    rewards = [1.0, 0.0, 0.25, 0.0]
    groups = [scored_group(f"g{g}", [(rewards[m], ["." + "#" * (4 * g + m + 1)]) for m in range(4)]) for g in range(2)]
    rows = example_rows(algorithm, groups)
    gradient, loss = policy_gradient(algorithm, rows, 8)
    assert np.abs(gradient).max() > 1e-3
    for size in (4, 2, 1):
        other, other_loss = policy_gradient(algorithm, rows, size)
        assert np.abs(other - gradient).max() < 1e-6
        assert other_loss == pytest.approx(loss, abs=1e-6)


def test_aggregations_differ() -> None:
    updates = [evaluate(a, example_rows(a)) for a in (grpo(**settings) for settings in AGGREGATIONS)]
    for one, other in combinations(updates, 2):
        assert np.abs(one.gradients["logprobs"] - other.gradients["logprobs"]).max() > 1e-3


# --- nothing to learn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=str)
def test_equal_rewards_give_a_gradient_of_exactly_zero(settings: dict[str, Any]) -> None:
    """So that the trainer can tell: an update without a gradient is skipped, weight decay and momentum included."""
    algorithm = grpo(**settings)
    rows = example_rows(algorithm, [scored_group("a", [(0.1, ["##"]), (0.1, [".#"]), (0.1, ["###"])])])
    update = evaluate(algorithm, rows)
    assert update.loss == 0
    assert not update.gradients["logprobs"].any()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_all_abstain(settings: dict[str, Any]) -> None:
    algorithm = grpo(**settings)
    rows = example_rows(algorithm, [scored_group("a", [(None, ["##"]), (None, [".#"])])])
    update = evaluate(algorithm, rows, garbage=NAN)
    assert sum(row.columns["units"] for row in rows) == 0
    assert update.loss == 0
    assert set(update.metrics.values()) == {(0.0, 0.0)}


def test_an_empty_response_counts_nowhere() -> None:
    """Its reward still belongs to the group; the other rows train as if its row were not there."""
    rows = example_rows(grpo(), [scored_group("a", [(1.0, [".##"]), (0.0, [".###"]), (0.0, ["..."])])])
    assert evaluate(grpo(), rows).loss == pytest.approx(evaluate(grpo(), rows[:2]).loss)
    assert sum(row.columns["units"] for row in rows) == 5
    assert ops.trained(make_batch(rows)).sum(-1).tolist() == [2, 3, 0]
