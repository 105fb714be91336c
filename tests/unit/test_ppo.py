"""PPO as a whole: settings, advantages, value loss and warm-up by hand, and the promises of every algorithm.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from relax_algorithms import ops
from relax_algorithms.plugin import relax_algorithms
from relax_algorithms.ppo import Ppo
from relax_algorithms.testing import aggregations
from relax_core.interfaces import Batch, Loss, Member, Outputs, Row, ScoredGroup, Streaming
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, scored_group
from relax_core.testing.training import tiny_config
from relax_core.types import Task

NAN = math.nan
Numbers = Mapping[str, Sequence[float]]
AGGREGATIONS = aggregations()
VARIANTS: list[dict[str, Any]] = [
    {"gamma": 0.9, "lam": 0.8},
    {"whiten": False},
    {"value_clip": None, "value_coefficient": 0.5},
    {"kl": {"place": "reward", "coefficient": 0.2}},
]


def ppo(**settings: Any) -> Ppo:
    return Ppo(Ppo.Config.model_validate(settings))


def group(*members: tuple[float | None, Sequence[Numbers]]) -> ScoredGroup:
    """A group from each member's reward and the columns of its rows; log-probs that a row does not give are -1."""

    def row(m: int, s: int, columns: Numbers) -> Row:
        whole = {"logprobs": [-1.0 if sampled else NAN for sampled in columns["mask"]], **columns}
        arrays = {name: np.array(v, np.int8 if name == "mask" else np.float32) for name, v in whole.items()}
        return Row(f"g/{m}/{s}", "g", arrays)

    found = [Member(reward, {}, [row(m, s, c) for s, c in enumerate(rows)]) for m, (reward, rows) in enumerate(members)]
    return ScoredGroup("g", Task("g", ()), found)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.5}, "gamma"),
        ({"lam": -0.1}, "lam"),
        ({"value_clip": 0.0}, "value_clip"),
        ({"value_coefficient": 0.0}, "value_coefficient"),
        ({"critic_warmup": -1}, "critic_warmup"),
        ({"aggregation": "constant"}, "constant is None"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        ppo(**settings)


def test_what_it_needs() -> None:
    algorithm = ppo()
    assert algorithm.needs == {"values"} and algorithm.makes == {"returns"}
    assert algorithm.outputs == {"logprobs", "values"} and algorithm.streaming is Streaming.BATCH
    assert ppo(kl={"coefficient": 0.1}).needs == {"values", "ref_logprobs"}
    assert ppo(entropy={"start": 0.1, "end": 0.1, "steps": 1}).outputs == {"logprobs", "values", "entropy"}
    assert ppo(whiten=False).streaming is Streaming.SCALE
    assert relax_algorithms()["ppo"].target == f"{Ppo.__module__}:{Ppo.__qualname__}"


def test_settings_that_were_written_out_are_settings() -> None:
    config = ppo(kl={"coefficient": 0.1}, critic_warmup=3).config
    assert Ppo.Config.model_validate(config.model_dump()) == config


def test_plays_are_not_compared() -> None:
    assert not list(Ppo.check(Ppo.Config(), tiny_config("ppo", steps=4, group_size=1)))
    assert ppo().group_metrics([scored_group("a", [(1.0, ["#"]), (1.0, ["#"])])]) == {}


def test_a_run_that_never_trains_the_policy_is_refused() -> None:
    (line,) = Ppo.check(Ppo.Config(critic_warmup=4), tiny_config("ppo", steps=4))
    assert "critic_warmup is 4 and steps is 4" in line
    assert not list(Ppo.check(Ppo.Config(critic_warmup=3), tiny_config("ppo", steps=4)))


# --- advantages by hand -----------------------------------------------------------------------------------------------

TWO_ROWS: list[Numbers] = [
    {"mask": [0, 1, 0, 1], "values": [NAN, 0.5, NAN, 0.2]},
    {"mask": [0, 1], "values": [NAN, 0.4]},
]
"""A play whose tokens, over two rows and an observation, have the values 0.5, 0.2 and 0.4."""


def test_advantages() -> None:
    """Gamma 0.9, lam 0.8, reward 1 at the end: delta = -0.32, 0.16, 0.6.

    A = -0.32 + 0.72 x 0.592 = 0.10624, 0.16 + 0.72 x 0.6 = 0.592, 0.6; returns A + V = 0.60624, 0.792, 1.
    """
    made = ppo(gamma=0.9, lam=0.8, whiten=False, aggregation="sequence-mean").advantages([group((1.0, TWO_ROWS))])
    assert made["g/0/0"]["advantages"] == pytest.approx([0, 0.10624, 0, 0.592])
    assert made["g/0/1"]["advantages"] == pytest.approx([0, 0.6])
    assert made["g/0/0"]["returns"] == pytest.approx([0, 0.60624, 0, 0.792])
    assert made["g/0/1"]["returns"] == pytest.approx([0, 1])
    assert [(m["weight"], m["units"]) for m in made.values()] == [(1 / 3, 1), (1 / 3, 0)]
    assert made["g/0/0"]["returns"].dtype == np.float32


def test_advantages_by_default() -> None:
    """Gamma 1, lam 1: what is still to come less the value, 1 - 0.5, 1 - 0.2, 1 - 0.4; each return is 1."""
    made = ppo(whiten=False).advantages([group((1.0, TWO_ROWS))])
    assert made["g/0/0"]["advantages"] == pytest.approx([0, 0.5, 0, 0.8])
    assert made["g/0/1"]["advantages"] == pytest.approx([0, 0.6])
    assert [made[row]["returns"].tolist() for row in made] == [[0, 1, 0, 1], [0, 1]]


def test_whitening() -> None:
    """The first play as above, and one of a token with reward 0 and value 0.5: A = 0.10624, 0.592, 0.6, -0.5.

    Mean 0.19956; squares of the deviations 0.008709, 0.154009, 0.160352, 0.489384; deviation sqrt(0.812454 / 3) =
    0.520402. The returns are those before it. A play that abstains is no part of it.
    """
    plays = group((1.0, TWO_ROWS), (0.0, [{"mask": [1], "values": [0.5]}]), (None, [{"mask": [1], "values": [NAN]}]))
    made = ppo(gamma=0.9, lam=0.8).advantages([plays])
    assert made["g/0/0"]["advantages"] == pytest.approx([0, -0.179323, 0, 0.754109], abs=2e-6)
    assert made["g/0/1"]["advantages"] == pytest.approx([0, 0.769482], abs=2e-6)
    assert made["g/1/0"]["advantages"] == pytest.approx([-1.344268], abs=2e-6)
    assert made["g/0/0"]["returns"] == pytest.approx([0, 0.60624, 0, 0.792])
    assert made["g/1/0"]["returns"] == pytest.approx([0])
    assert made["g/2/0"] == {"advantages": [0], "returns": [0], "weight": 0, "units": 0}


def test_kl_in_the_reward() -> None:
    """k1 = 0.5 and -1 at coefficient 0.1, values 0.3 and 0.6: rewards -0.05 and 1.1, returns 1.05 and 1.1."""
    columns: Numbers = {
        "mask": [1, 0, 1],
        "values": [0.3, NAN, 0.6],
        "logprobs": [-1.0, NAN, -1.0],
        "ref_logprobs": [-1.5, NAN, 0.0],
    }
    algorithm = ppo(whiten=False, kl={"place": "reward", "coefficient": 0.1})
    made = algorithm.advantages([group((1.0, [columns]))])["g/0/0"]
    assert made["returns"] == pytest.approx([1.05, 0, 1.1])
    assert made["advantages"] == pytest.approx([0.75, 0, 0.5])
    in_loss = ppo(whiten=False, kl={"coefficient": 0.1}).advantages([group((1.0, [columns]))])["g/0/0"]
    assert in_loss["returns"] == pytest.approx([1, 0, 1])


# --- value loss by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1.0, -1.0], ids=["above", "below"])
def test_value_loss(side: float) -> None:
    """Old value 0, return 1 (or all of it mirrored), clip 0.2; what is masked is NaN.

    V = 0.1, within: (0.1 - 1)^2 / 2 = 0.405, gradient -0.9. V = 0.5, towards the return: (0.2 - 1)^2 / 2 = 0.32,
    gradient 0. V = -0.5, away: 1.5^2 / 2 = 1.125, gradient -1.5. V = 3, past the return: max(2^2, 0.8^2) / 2 = 2,
    gradient 2.
    """
    values_BT = (side * torch.tensor([[0.1, 0.5, -0.5, 3.0, NAN]])).requires_grad_()
    old_BT = torch.tensor([[0.0, 0.0, 0.0, 0.0, NAN]])
    returns_BT = side * torch.tensor([[1.0, 1.0, 1.0, 1.0, NAN]])
    mask_BT = torch.tensor([[True, True, True, True, False]])
    loss_BT, clipped_BT = ops.value_loss(values_BT, old_BT, returns_BT, 0.2, mask_BT)
    assert loss_BT[0].tolist() == pytest.approx([0.405, 0.32, 1.125, 2, 0])
    assert clipped_BT[0].tolist() == [False, True, False, False, False]
    (gradient,) = torch.autograd.grad(loss_BT.sum(), values_BT)
    assert gradient[0].tolist() == pytest.approx([-0.9 * side, 0, -1.5 * side, 2 * side, 0])
    loss_BT, clipped_BT = ops.value_loss(values_BT, old_BT, returns_BT, None, mask_BT)
    assert loss_BT[0].tolist() == pytest.approx([0.405, 0.125, 1.125, 2, 0])
    assert not clipped_BT.any()
    (gradient,) = torch.autograd.grad(loss_BT.sum(), values_BT)
    assert gradient[0].tolist() == pytest.approx([-0.9 * side, -0.5 * side, -1.5 * side, 2 * side, 0])


def by_hand(step: int = 0) -> tuple[Batch, dict[str, Tensor]]:
    """Ratios 1.5 and 0.5 at advantages 1 and 1; values 0.1 and 0.5, once 0 and 0, with returns 1; then a masked token.

    Off the reference by log-ratios of 0.2; entropies 1 and 2.
    """
    old_BT = torch.tensor([[-2.0, -2.0, NAN]])
    logprobs_BT = old_BT + torch.tensor([[1.5, 0.5, NAN]]).log()
    batch = Batch(
        step=step,
        tokens_BT=torch.zeros(1, 3, dtype=torch.long),
        mask_BT=torch.tensor([[True, True, False]]),
        logprobs_BT=old_BT - 0.1,
        old_logprobs_BT=old_BT,
        advantages_BT=torch.tensor([[1.0, 1.0, NAN]]),
        weight_B=torch.tensor([0.5]),
        units_B=torch.tensor([1.0]),
        sequence_B=torch.tensor([0]),
        columns={
            "values": torch.tensor([[0.0, 0.0, NAN]]),
            "returns": torch.tensor([[1.0, 1.0, NAN]]),
            "ref_logprobs": logprobs_BT - 0.2,
        },
    )
    computed = {
        "logprobs_BT": logprobs_BT,
        "values_BT": torch.tensor([[0.1, 0.5, NAN]]),
        "entropy_BT": torch.tensor([[1.0, 2.0, NAN]]),
    }
    return batch, {name: tensor.requires_grad_() for name, tensor in computed.items()}


def test_loss() -> None:
    """Policy -1.2 (clipped) - 0.5, value 0.405 + 0.32 (clipped), times the weight 0.5."""
    batch, computed = by_hand()
    loss, of_value = losses(ppo(), batch, computed)
    assert loss.total.item() == pytest.approx(0.5 * -1.7)
    assert of_value.total.item() == pytest.approx(0.5 * 0.725)
    (policy,) = torch.autograd.grad(loss.total, computed["logprobs_BT"])
    (value,) = torch.autograd.grad(of_value.total, computed["values_BT"])
    assert policy[0].tolist() == pytest.approx([0, -0.5 * 0.5, 0])
    assert value[0].tolist() == pytest.approx([0.5 * -0.9, 0, 0])
    assert loss.clipped_BT is not None and loss.clipped_BT[0].tolist() == [True, False, False]
    found = {name: total.item() for name, (total, _) in of_value.metrics.items()}
    assert found == pytest.approx({"value_loss": 0.725, "value_clipped": 1, "value": 0.6, "returns": 2})
    assert {count.item() for _, count in (*loss.metrics.values(), *of_value.metrics.values())} == {2}
    policy_too, twice = losses(ppo(value_coefficient=2.0, value_clip=None), batch, computed)
    assert policy_too.total.item() == loss.total.item()
    assert twice.total.item() == pytest.approx(0.5 * 2 * (0.405 + 0.125))


def losses(algorithm: Ppo, batch: Batch, computed: dict[str, torch.Tensor]) -> tuple[Loss, Loss]:
    """The policy's and the critic's."""
    of_policy = {name: tensor for name, tensor in computed.items() if name != "values_BT"}
    return algorithm.loss(batch, Outputs(**of_policy)), algorithm.value_loss(batch, computed["values_BT"])


OPTIONS: dict[str, Any] = {
    "kl": {"coefficient": 0.1},
    "entropy": {"start": 0.2, "end": 0.2, "steps": 1},
    "correction": {"kind": "truncate"},
}


@pytest.mark.parametrize("settings", [{}, OPTIONS], ids=["plain", "options"])
def test_warm_up_trains_the_critic_alone(settings: dict[str, Any]) -> None:
    """Steps 0 to 2 of 3: the policy's total is 0 and has no gradient, the critic's is 0.5 x 0.725."""
    algorithm = ppo(critic_warmup=3, **settings)
    for step in range(3):
        batch, computed = by_hand(step)
        loss, of_value = losses(algorithm, batch, computed)
        assert loss.total.item() == 0 and not loss.total.requires_grad
        assert of_value.total.item() == pytest.approx(0.5 * 0.725)
        of_value.total.backward()  # type: ignore[no-untyped-call]
        assert computed["logprobs_BT"].grad is None and computed["entropy_BT"].grad is None
        assert computed["values_BT"].grad is not None
        assert loss.metrics["ratio"][0].item() == pytest.approx(2.0)
    batch, computed = by_hand(step=3)
    loss, _ = losses(algorithm, batch, computed)
    assert loss.total.item() == losses(ppo(**settings), batch, computed)[0].total.item() < 0
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert computed["logprobs_BT"].grad is not None and computed["logprobs_BT"].grad.any()


def test_corrections_weigh_the_policy_only() -> None:
    """The engine is off by 0.1, outside of both bounds: nothing is left of the policy's loss, all of the value's."""
    bounds = {"low": 0.99, "high": 1.01}
    for setting in ({"correction": {"kind": "mask", **bounds}}, {"rejection": bounds}):
        batch, computed = by_hand()
        loss, of_value = losses(ppo(**setting), batch, computed)
        assert loss.total.item() == 0
        assert of_value.total.item() == pytest.approx(0.5 * 0.725)


# --- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*AGGREGATIONS, *VARIANTS], ids=str)
def test_keeps_the_promises_of_every_algorithm(settings: dict[str, Any]) -> None:
    check_algorithm(ppo(**settings))


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("variant", [{"kl": {"coefficient": 0.1}}, {"critic_warmup": 1}], ids=str)
def test_without_its_policy_gradient(variant: dict[str, Any], settings: dict[str, Any]) -> None:
    """With KL in the loss, and during the warm-up: the other promises hold."""
    check_algorithm(ppo(**variant, **settings), policy_gradient=False)


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=str)
def test_the_values_have_the_gradient_of_their_loss(settings: dict[str, Any]) -> None:
    """(V - G) x weight / units at every trained token, under the same aggregation as the policy."""
    algorithm = ppo(value_clip=None, **settings)
    rows = [row for row in example_rows(algorithm) if row.columns["weight"]]
    units, expected = sum(row.columns["units"] for row in rows), []
    for columns in (row.columns for row in rows):
        gradient = (columns["policy_values"] - columns["returns"]) * columns["mask"] * columns["weight"] / units
        expected.append(gradient[int(columns["mask"].argmax()) :])
    found = evaluate(algorithm, rows).gradients["values"]
    assert np.abs(found - np.concatenate(expected)).max() < 1e-6 < np.abs(found).max()


def test_variants_differ() -> None:
    found = [evaluate(a, example_rows(a)) for a in (ppo(**variant) for variant in [{}, *VARIANTS])]
    for i, one in enumerate(found):
        for other in found[:i]:
            difference = [np.abs(one.gradients[name] - other.gradients[name]).max() for name in one.gradients]
            assert max(difference) > 1e-3


def test_values_under_the_mask_change_nothing() -> None:
    """NaN where nothing was sampled, in the critic's values: advantages, returns and shares stay as they were."""
    groups = [scored_group("a", [(1.0, [".##.#", "..#"]), (0.0, [".#"])], frozenset({"values"}))]
    before = ppo().advantages(groups)
    for row in (row for member in groups[0].members for row in member.rows):
        row.columns["values"][row.columns["mask"] == 0] = NAN
    for row_id, columns in ppo().advantages(groups).items():
        for name, value in columns.items():
            assert np.array_equal(value, before[row_id][name])


def test_groups_of_one_are_learned_from() -> None:
    algorithm = ppo(value_clip=None)
    groups = [scored_group(name, [(reward, [".##"])], algorithm.needs) for name, reward in (("a", 1.0), ("b", 0.0))]
    update = evaluate(algorithm, example_rows(algorithm, groups), old=False)
    assert all(np.abs(gradient).min() > 1e-3 for gradient in update.gradients.values())


@pytest.mark.parametrize("settings", [{}, {"kl": {"place": "reward", "coefficient": 0.2}}], ids=str)
def test_all_abstain_or_nothing_was_sampled(settings: dict[str, Any]) -> None:
    algorithm = ppo(**settings)
    rows = example_rows(algorithm, [scored_group("a", [(None, ["##"]), (1.0, ["..."])], algorithm.needs)])
    update = evaluate(algorithm, rows, garbage=NAN)
    assert sum(row.columns["units"] for row in rows) == 0
    assert update.loss == 0 and set(update.metrics.values()) == {(0.0, 0.0)}
