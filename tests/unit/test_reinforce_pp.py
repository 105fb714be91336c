"""REINFORCE++ as a whole: settings, advantages and loss by hand, and the promises of every algorithm.

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

from relax_algorithms.plugin import relax_algorithms
from relax_algorithms.reinforce_pp import ReinforcePlusPlus
from relax_algorithms.testing import aggregations
from relax_core.interfaces import Batch, Member, Outputs, Row, ScoredGroup, Streaming
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, scored_group
from relax_core.testing.training import tiny_config
from relax_core.types import Task

NAN = math.nan
Numbers = Mapping[str, Sequence[float]]
AGGREGATIONS = aggregations()
VARIANTS: list[dict[str, Any]] = [
    {},
    {"gamma": 0.9},
    {"baseline": True},
    {"gamma": 0.9, "kl": {"place": "reward", "coefficient": 0.2}},
    {"baseline": True, "kl": {"place": "reward", "coefficient": 0.2}},
]


def made(**settings: Any) -> ReinforcePlusPlus:
    return ReinforcePlusPlus(ReinforcePlusPlus.Config.model_validate(settings))


def group(name: str, *members: tuple[float | None, Sequence[Numbers]]) -> ScoredGroup:
    """A group from each member's reward and the columns of its rows; log-probs that a row does not give are -1."""

    def row(m: int, s: int, columns: Numbers) -> Row:
        whole = {"logprobs": [-1.0 if sampled else NAN for sampled in columns["mask"]], **columns}
        arrays = {name: np.array(v, np.int8 if name == "mask" else np.float32) for name, v in whole.items()}
        return Row(f"{name}/{m}/{s}", name, arrays)

    return ScoredGroup(
        name,
        Task(name, ()),
        [Member(reward, {}, [row(m, s, c) for s, c in enumerate(rows)]) for m, (reward, rows) in enumerate(members)],
    )


def advantages(algorithm: ReinforcePlusPlus, *groups: ScoredGroup) -> list[list[float]]:
    return [columns["advantages"].tolist() for columns in algorithm.advantages(groups).values()]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_group_of_one_is_refused_with_a_baseline_only() -> None:
    one = tiny_config("reinforce++", group_size=1)
    assert not list(ReinforcePlusPlus.check(ReinforcePlusPlus.Config(), one))
    (line,) = ReinforcePlusPlus.check(ReinforcePlusPlus.Config(baseline=True), one)
    assert "group_size 1" in line and "leave baseline out" in line
    assert not list(
        ReinforcePlusPlus.check(ReinforcePlusPlus.Config(baseline=True), tiny_config("reinforce++", group_size=2))
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"whiten": False}, "whiten\n.*there is no other: leave whiten out"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.1}, "gamma"),
        ({"lam": 0.9}, "lam"),
        ({"aggregation": "constant"}, "constant is None"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "zero mean"),
        ({"kl": {"coefficient": 0.1, "estimator": "k2", "place": "reward"}}, "k2 as a reward is biased"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        made(**settings)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_settings_that_were_written_out_are_settings(settings: dict[str, Any]) -> None:
    config = made(**settings).config
    assert ReinforcePlusPlus.Config.model_validate(config.model_dump()) == config


def test_what_it_needs() -> None:
    assert made().needs == frozenset() and made().streaming is Streaming.BATCH
    assert made(kl={"place": "reward", "coefficient": 0.1}).needs == {"ref_logprobs"}
    assert relax_algorithms()["reinforce++"].target == f"{ReinforcePlusPlus.__module__}:ReinforcePlusPlus"


def test_the_estimator_of_the_kl() -> None:
    """k2 in the loss, where others take k3; what the run file says wins."""
    kinds = []
    for kl in ({}, {"estimator": "k3"}, {"place": "reward"}):
        penalty = made(kl={"coefficient": 0.1, **kl}).config.kl
        kinds.append(penalty and penalty.kind)
    assert kinds == ["k2", "k3", "k1"]


# --- advantages by hand -----------------------------------------------------------------------------------------------


def test_whitened_over_the_step() -> None:
    """Returns 1, 1 | 0, 0 of two tasks: mean 0.5, deviation sqrt(4 x 0.25 / 3) = 0.577350; observations have none."""
    groups = (group("a", (1.0, [{"mask": [0, 1, 0, 1]}])), group("b", (0.0, [{"mask": [1, 1]}])))
    first, second = advantages(made(), *groups)
    assert first == pytest.approx([0, 0.866024, 0, 0.866024], abs=1e-6)
    assert second == pytest.approx([-0.866024, -0.866024], abs=1e-6)


def test_discounted_and_over_rows() -> None:
    """Gamma 0.5: returns 0.5, 1 | 0, 0, the first play in two rows.

    Mean 0.375; deviation sqrt((0.125^2 + 0.625^2 + 2 x 0.375^2) / 3) = sqrt(0.6875 / 3) = 0.478714.
    """
    play = (1.0, [{"mask": [0, 1, 0]}, {"mask": [0, 1]}])
    found = advantages(made(gamma=0.5), group("a", play), group("b", (0.0, [{"mask": [1, 1]}])))
    right = [[0, 0.261116, 0], [0, 1.305579], [-0.783347, -0.783347]]
    for row, expected in zip(found, right, strict=True):
        assert row == pytest.approx(expected, abs=2e-6)


def test_kl_in_the_reward() -> None:
    """k1 = 0.5, -0.2, 1 at coefficient 0.1: rewards -0.05, 0.02, 0.9 and returns 0.87, 0.92, 0.9.

    Mean 2.69 / 3 = 0.896667; deviation sqrt((0.026667^2 + 0.023333^2 + 0.003333^2) / 2) = 0.025166.
    """
    columns: Numbers = {"mask": [1, 0, 1, 1], "logprobs": [-1, NAN, -1, -1], "ref_logprobs": [-1.5, NAN, -0.8, -2]}
    (found,) = advantages(made(kl={"place": "reward", "coefficient": 0.1}), group("a", (1.0, [columns])))
    assert found == pytest.approx([-1.059585, 0, 0.927137, 0.132448], abs=1e-4)
    (without,) = advantages(made(kl={"coefficient": 0.1}), group("a", (1.0, [columns])))
    assert without == [0, 0, 0, 0]  # equal returns: in the loss the KL is no part of them


def test_plays_that_abstain_are_no_part_of_the_whitening() -> None:
    groups = [
        group("a", (1.0, [{"mask": [1, 1]}]), (None, [{"mask": [1] * 5, "logprobs": [NAN] * 5}])),
        group("b", (0.0, [{"mask": [1, 1]}])),
    ]
    found = advantages(made(), *groups)
    assert found[1] == [0] * 5
    assert found[0] == pytest.approx([0.866024] * 2, abs=1e-6)


def test_baseline() -> None:
    """Rewards 3, 1 (one abstains) and 1, 1: less their tasks' means 1, -1 | 0, 0; one token each.

    Mean 0, deviation sqrt(2 / 3) = 0.816497. Without: 3, 1 | 1, 1, mean 1.5, deviation 1.
    """
    token = [{"mask": [0, 1]}]
    groups = (group("a", (3.0, token), (1.0, token), (None, token)), group("b", (1.0, token), (1.0, token)))
    found = [row[1] for row in advantages(made(baseline=True), *groups)]
    assert found == pytest.approx([1.224743, -1.224743, 0, 0, 0], abs=1e-6)
    found = [row[1] for row in advantages(made(), *groups)]
    assert found == pytest.approx([1.5, -0.5, 0, -0.5, -0.5], abs=2e-6)


def test_baseline_with_kl_in_the_reward() -> None:
    """Rewards 2, 0 less their mean: 1, -1; k1 = 1 on the first play's first token at 0.5: returns 0.5, 1 | -1, -1.

    Mean -0.125; deviation sqrt((0.625^2 + 1.125^2 + 2 x 0.875^2) / 3) = sqrt(3.1875 / 3) = 1.030776.
    """
    one: Numbers = {"mask": [1, 1], "ref_logprobs": [-2.0, -1.0]}
    other: Numbers = {"mask": [1, 1], "ref_logprobs": [-1.0, -1.0]}
    algorithm = made(baseline=True, kl={"place": "reward", "coefficient": 0.5})
    first, second = advantages(algorithm, group("a", (2.0, [one]), (0.0, [other])))
    assert first == pytest.approx([0.606339, 1.091411], abs=2e-6)
    assert second == pytest.approx([-0.848875, -0.848875], abs=2e-6)


def test_what_is_reported_of_groups() -> None:
    token = [{"mask": [1]}]
    groups = [group("a", (1.0, token), (1.0, token))]
    assert made().group_metrics(groups) == {}
    assert made(baseline=True).group_metrics(groups)["groups_equal"] == (1, 1)


# --- loss -------------------------------------------------------------------------------------------------------------


def by_hand() -> tuple[Batch, torch.Tensor]:
    """Ratios 1.5, 0.5, 1.5, 0.5 at advantages 1, 1, -1, -1, then a masked token; log-ratios to ref 0.2 and -0.4."""
    ratio_BT = torch.tensor([[1.5, 0.5, 1.5, 0.5, NAN]])
    old_BT = torch.tensor([[-2.0, -2.0, -2.0, -2.0, NAN]])
    logprobs_BT = old_BT + ratio_BT.log()
    batch = Batch(
        step=0,
        tokens_BT=torch.zeros(1, 5, dtype=torch.long),
        mask_BT=torch.tensor([[True, True, True, True, False]]),
        logprobs_BT=old_BT - 0.1,
        old_logprobs_BT=old_BT,
        advantages_BT=torch.tensor([[1.0, 1.0, -1.0, -1.0, NAN]]),
        weight_B=torch.tensor([0.5]),
        units_B=torch.tensor([1.0]),
        sequence_B=torch.tensor([0]),
        columns={"ref_logprobs": logprobs_BT - torch.tensor([[0.2, 0.2, -0.4, -0.4, NAN]])},
    )
    return batch, logprobs_BT.requires_grad_()


def test_loss() -> None:
    """Token losses -1.2 (clipped), -0.5, 1.5, 0.8 (clipped), times the weight 0.5."""
    batch, logprobs_BT = by_hand()
    loss = made().loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * 0.6)
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([0, -0.5 * 0.5, 0.5 * 1.5, 0, 0])
    assert loss.clipped_BT is not None and loss.clipped_BT.tolist() == [[True, False, False, True, False]]


def test_loss_with_kl() -> None:
    """k2 = d^2 / 2 = 0.02, 0.02, 0.08, 0.08 and its gradient d, times 0.3; nothing of the kind when it is a reward."""
    batch, logprobs_BT = by_hand()
    loss = made(kl={"coefficient": 0.3}).loss(batch, Outputs(logprobs_BT))
    assert loss.total.item() == pytest.approx(0.5 * (0.6 + 0.3 * 0.2))
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert gradient.tolist()[0] == pytest.approx([0.03, -0.25 + 0.03, 0.75 - 0.06, -0.06, 0])
    assert loss.metrics["kl_ref"][0].item() == pytest.approx(0.2)
    reward = made(kl={"coefficient": 0.3, "place": "reward"}).loss(batch, Outputs(logprobs_BT))
    assert reward.total.item() == pytest.approx(0.5 * 0.6)
    assert reward.metrics["kl_ref"][0].item() == pytest.approx(-0.4)


# --- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*AGGREGATIONS, *VARIANTS[1:]], ids=str)
def test_keeps_the_promises_of_every_algorithm(settings: dict[str, Any]) -> None:
    check_algorithm(made(**settings))


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=str)
def test_with_kl_in_the_loss(settings: dict[str, Any]) -> None:
    check_algorithm(made(kl={"coefficient": 0.1}, **settings), policy_gradient=False)


def test_variants_differ() -> None:
    found = [evaluate(a, example_rows(a)).gradients["logprobs"] for a in (made(**variant) for variant in VARIANTS)]
    for i, one in enumerate(found):
        assert all(np.abs(one - other).max() > 1e-3 for other in found[:i])


def test_groups_of_one_are_learned_from() -> None:
    groups = [scored_group("a", [(1.0, [".##"])]), scored_group("b", [(0.0, [".##"])])]
    update = evaluate(made(), example_rows(made(), groups), old=False)
    assert np.abs(update.gradients["logprobs"]).min() > 1e-2


@pytest.mark.parametrize("variant", [{}, {"baseline": True}], ids=str)
def test_equal_rewards_give_a_gradient_of_exactly_zero(variant: dict[str, Any]) -> None:
    algorithm = made(**variant)
    rows = example_rows(algorithm, [scored_group("a", [(0.1, ["##"]), (0.1, [".#"]), (0.1, ["###"])])])
    update = evaluate(algorithm, rows)
    assert update.loss == 0 and not update.gradients["logprobs"].any()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_all_abstain_or_nothing_was_sampled(variant: dict[str, Any]) -> None:
    algorithm = made(**variant)
    groups = [scored_group("a", [(None, ["##"]), (1.0, ["..."])], algorithm.needs)]
    rows = example_rows(algorithm, groups)
    update = evaluate(algorithm, rows, garbage=NAN)
    assert sum(row.columns["units"] for row in rows) == 0
    assert update.loss == 0 and set(update.metrics.values()) == {(0.0, 0.0)}
