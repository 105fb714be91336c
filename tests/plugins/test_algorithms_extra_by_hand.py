"""The algorithms of the plugin algorithms-extra against numbers worked out by hand.

Legend: B rows of a micro-batch, T tokens of the widest row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.errors import DataError
from relax_core.interfaces import Algorithm, Batch, Outputs, Row, ScoredGroup
from relax_core.testing.algorithm_checks import scored_group
from relax_plugin_algorithms_extra.dppo import Dppo
from relax_plugin_algorithms_extra.gdpo import Gdpo
from relax_plugin_algorithms_extra.gmpo import Gmpo
from relax_plugin_algorithms_extra.m2po import M2po, limit_of
from relax_plugin_algorithms_extra.maxrl import Maxrl

NAN = math.nan
Drawn = Sequence[tuple[Any, Sequence[str]]]


def advantages(algorithm: Algorithm, *groups: ScoredGroup) -> dict[str, float]:
    """By row id the advantage of its sampled tokens, which must be one number."""
    found = {}
    rows = {row.id: row for group in groups for member in group.members for row in member.rows}
    for id, columns in algorithm.advantages(groups).items():
        values = set(columns["advantages"][rows[id].columns["mask"] > 0].tolist())
        assert len(values) <= 1
        found[id] = values.pop() if values else 0.0
    return found


def in_a_group(algorithm: Algorithm, *rewards: Any) -> list[float]:
    return list(advantages(algorithm, scored_group("a", [(reward, [".##"]) for reward in rewards])).values())


def batch_of(
    advantages: list[list[float]],
    weight: float = 1.0,
    mu: list[list[float]] | None = None,
    old: list[list[float]] | None = None,
    **columns: list[list[float]],
) -> Batch:
    """Rows of one trajectory; probabilities ``mu`` and ``old`` (default: the other, or 0.1). NaN: not sampled."""
    shape = torch.tensor(advantages).shape
    mu_BT = torch.full(shape, 0.1) if mu is None and old is None else torch.tensor(mu or old)
    return Batch(
        step=0,
        tokens_BT=torch.zeros(shape, dtype=torch.long),
        mask_BT=~torch.tensor(advantages).isnan(),
        logprobs_BT=mu_BT.log(),
        old_logprobs_BT=mu_BT.log() if old is None else torch.tensor(old).log(),
        advantages_BT=torch.tensor(advantages),
        weight_B=torch.full(shape[:1], weight),
        units_B=torch.ones(shape[:1]),
        sequence_B=torch.zeros(shape[:1], dtype=torch.long),
        columns={name: torch.tensor(values) for name, values in columns.items()},
    )


def trained(algorithm: Algorithm, batch: Batch, pi: list[list[float]]) -> tuple[float, Any, Mapping[str, float], Any]:
    """Loss, its gradient with respect to log pi, the sums of its metrics, and which tokens were clipped."""
    logprobs_BT = torch.tensor(pi).log().requires_grad_()
    loss = algorithm.loss(batch, Outputs(logprobs_BT))
    (gradient,) = torch.autograd.grad(loss.total, logprobs_BT)
    assert loss.clipped_BT is not None
    sums = {name: total.item() for name, (total, _) in loss.metrics.items()}
    return loss.total.item(), gradient.tolist(), sums, loss.clipped_BT.tolist()


# --- maxrl ------------------------------------------------------------------------------------------------------------

MAXRL = Maxrl(Maxrl.Config())


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0] + 7 * [0.0], [7.0] + 7 * [-1.0]),  # mean 1/8
        (7 * [1.0] + [0.0], 7 * [1 / 7] + [-1.0]),  # mean 7/8
        ([1.0, 0.5, 0.0, 0.1], [1.5, 0.25, -1.0, -0.75]),  # mean 0.4
        ([1.0, None, 0.0], [1.0, 0.0, -1.0]),  # mean 0.5, of the two that have one
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([1.0, None], [0.0, 0.0]),
        ([1e-9, 0.0], [1.0, -1.0]),  # nothing is added to the mean
    ],
)
def test_maxrl_advantages(rewards: list[float | None], expected: list[float]) -> None:
    assert in_a_group(MAXRL, *rewards) == pytest.approx(expected, abs=1e-6)


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(DataError, match=r"a play of task 'sums' has the reward -0.25; .* shift the rewards"):
        MAXRL.advantages([scored_group("sums", [(1.0, ["#"]), (None, ["#"]), (-0.25, ["#"])])])


def test_maxrl_loss() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 at advantages 1, 1, -1, -1: losses -1.2, -0.5, 1.5, 0.8, times 0.5."""
    batch = batch_of([[1, 1, -1, -1, NAN]], weight=0.5, old=[[0.1] * 5])
    loss, gradient, _, clipped = trained(MAXRL, batch, [[0.15, 0.05, 0.15, 0.05, NAN]])
    assert loss == pytest.approx(0.5 * 0.6)
    assert gradient[0] == pytest.approx([0, -0.25, 0.75, 0, 0])
    assert clipped == [[True, False, False, True, False]]


# --- gdpo -------------------------------------------------------------------------------------------------------------

RIGHT = [2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)]
"""Rewards 1, 0, 0: mean 1/3, squared deviations 4/9, 1/9, 1/9, of which half is 1/3."""
FORM = [-0.5 / math.sqrt(0.5), 0.5 / math.sqrt(0.5), 0.0]
"""Rewards 0, 1 and an abstention: mean 1/2, squared deviations 1/4, 1/4."""
REWARDS = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}, {"right": 0.0, "form": None}]


def gdpo_groups(lengths: Sequence[int] = (1, 3, 2), last: Sequence[str] = (".#",)) -> list[ScoredGroup]:
    """The three plays above; and a group in which no reward tells plays apart."""
    drawn: Drawn = [(reward, ["." + n * "#"]) for reward, n in zip(REWARDS, lengths, strict=True)]
    equal = {"right": 0.1, "form": 0.7}
    return [scored_group("a", drawn), scored_group("b", [(equal, [".####"]), (equal, last)])]


@pytest.mark.parametrize(("weights", "factor"), [({}, 1.0), ({"form": 0.5}, 0.5), ({"form": -1.0, "right": 1.0}, -1.0)])
def test_gdpo_advantages(weights: dict[str, float], factor: float) -> None:
    """The sums are right + factor x form, their deviation that of five plays: two of them 0, and the mean 0."""
    sums = [right + factor * form for right, form in zip(RIGHT, FORM, strict=True)]
    deviation = math.sqrt(sum(s * s for s in sums) / (5 - 1))
    assert deviation == pytest.approx(np.std([*sums, 0, 0], ddof=1))
    found = advantages(Gdpo(Gdpo.Config(weights=weights)), *gdpo_groups())
    expected = [s / deviation for s in sums]
    assert [found[f"a/{m}/0"] for m in range(3)] == pytest.approx(expected, rel=1e-5)
    assert [found["b/0/0"], found["b/1/0"]] == [0.0, 0.0]  # exactly


def test_gdpo_counts_plays_not_tokens() -> None:
    """Longer replies, and one in two rows, change nothing; an empty one is not trained and not counted."""
    gdpo = Gdpo(Gdpo.Config())
    short, long = advantages(gdpo, *gdpo_groups()), advantages(gdpo, *gdpo_groups((9, 1, 20), (".#", ".##")))
    assert long == short | {"b/1/1": 0.0}
    four = advantages(gdpo, *gdpo_groups(last=("...",)))
    assert four["a/0/0"] == pytest.approx(short["a/0/0"] * math.sqrt(3 / 4), rel=1e-5)


def test_gdpo_tells_apart_what_sums_do_not() -> None:
    """Right 1, 0 and form 0, 1 have equal sums: GRPO learns nothing, gdpo what the weights say."""
    rewards = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}]
    assert in_a_group(Gdpo(Gdpo.Config()), *rewards) == [0, 0]
    found = in_a_group(Gdpo(Gdpo.Config(weights={"right": 2.0})), *rewards)
    # sums 2c - c and c - 2c, c = sqrt(1/2); their deviation is sqrt(2 c^2) = 1
    assert found == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)
    metrics = Gdpo(Gdpo.Config(weights={"right": 2.0})).group_metrics(gdpo_groups())
    assert metrics["groups_equal"] == (1.0, 2.0)


def test_gdpo_leaves_out_a_play_that_is_not_trained() -> None:
    """Its rewards were given, but a callback made their sum None."""
    (group, other) = gdpo_groups()
    members = [*group.members[:2], type(group.members[2])(None, {"right": 9.0, "form": 9.0}, group.members[2].rows)]
    found = advantages(Gdpo(Gdpo.Config(weights={"form": 0.0})), ScoredGroup("a", group.task, members), other)
    # right 1, 0 becomes sqrt(1/2), -sqrt(1/2); with two plays of 0 the deviation is sqrt(1 / 3)
    assert [found[f"a/{m}/0"] for m in range(3)] == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0], rel=1e-5)


# --- m2po -------------------------------------------------------------------------------------------------------------


def row(id: str, log_ratios: list[float], signs: list[float], weight: float = 1.0) -> Row:
    """A row whose policy at the start of the step is that far from mu; NaN: not sampled."""
    ratio = np.array(log_ratios, np.float32)
    columns = {
        "mask": np.array([not math.isnan(value) for value in log_ratios], np.int8),
        "logprobs": np.where(np.isnan(ratio), NAN, -1.0).astype(np.float32),
        "old_logprobs": ratio - 1,
        "advantages": np.array(signs, np.float32),
        "weight": weight,
    }
    return Row(id, id.split("/")[0], columns)


ROWS = [
    row("a/0/0", [NAN, 0.1, 0.3, NAN, 0.5, -0.9], [0, 1, 1, 0, 1, 1]),
    row("b/0/0", [-0.2, 0.7, 0.0], [-1, -1, -1]),
    row("b/1/0", [3.0, 3.0], [0, 0], weight=0.0),
    row("b/2/0", [NAN], [0], weight=0.0),
]
"""Harmful: 0.1, 0.3, 0.5 and -0.2. Squares 0.01, 0.04, 0.09, 0.25, with means 0.01, 0.025, 0.0467, 0.0975 so far."""


@pytest.mark.parametrize(
    ("threshold", "a", "b"),
    [
        (0.1, [0, 1, 1, 0, 1, 1], [1, 1, 1]),
        (0.05, [0, 1, 1, 0, 0, 1], [1, 1, 1]),
        (0.04, [0, 1, 0, 0, 0, 1], [1, 1, 1]),
        (0.02, [0, 1, 0, 0, 0, 1], [0, 1, 1]),
        (0.005, [0, 0, 0, 0, 0, 1], [0, 1, 1]),
    ],
)
def test_m2po_mask(threshold: float, a: list[int], b: list[int]) -> None:
    m2po = M2po(M2po.Config(threshold=threshold))
    found = m2po.prepare(ROWS)
    masks = {id: columns["m2_mask"] for id, columns in found.items()}
    assert all(mask.dtype == np.float32 for mask in masks.values())
    assert masks["a/0/0"].tolist() == a and masks["b/0/0"].tolist() == b
    assert masks["b/2/0"].tolist() == [0]
    turned = m2po.prepare(ROWS[::-1])
    assert all((turned[id]["m2_mask"] == mask).all() for id, mask in masks.items())


def test_m2po_mask_belongs_to_the_step() -> None:
    """Half of the rows would be masked otherwise: so no micro-batch can decide."""
    m2po = M2po(M2po.Config())
    halves = {**m2po.prepare(ROWS[:1]), **m2po.prepare(ROWS[1:])}
    assert halves["a/0/0"]["m2_mask"].tolist() == [0, 1, 0, 0, 0, 1]
    others = row("c/0/0", [0.05] * 20, [1] * 20)
    assert m2po.prepare([*ROWS, others])["a/0/0"]["m2_mask"].tolist() == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("squares", "limit"),
    [
        ([], math.inf),
        ([0.04], math.inf),
        ([0.09, 0.01], 0.09),  # mean 0.05
        ([0.06, 0.01, 0.06], 0.06),  # means 0.01, 0.035, 0.0433: equal ones go together
        ([0.5, 0.5], 0.5),
    ],
)
def test_m2po_limit(squares: list[float], limit: float) -> None:
    assert limit_of(np.array(squares), 0.04) == limit


def test_m2po_loss() -> None:
    """Ratios to mu 1.5, 0.5, 2 and 0.5, the third masked; half of each counts. Old policy and mu differ."""
    batch = batch_of([[1, 1, 1, -1, NAN]], 0.5, mu=[[0.1] * 5], old=[[0.4] * 5], m2_mask=[[1, 1, 0, 1, NAN]])
    loss, gradient, sums, clipped = trained(M2po(M2po.Config()), batch, [[0.15, 0.05, 0.2, 0.05, NAN]])
    assert loss == pytest.approx(0.5 * (-1.5 - 0.5 + 0.5))
    assert gradient[0] == pytest.approx([-0.75, -0.25, 0, 0.25, 0])
    assert clipped == [[False, False, True, False, False]]
    assert sums["m2"] == pytest.approx(math.log(1.5) ** 2 + math.log(2) ** 2)  # the kept ones that move away


# --- dppo -------------------------------------------------------------------------------------------------------------


def test_dppo_loss() -> None:
    """By token: what mu gave, what pi gives, the advantage.

    0.001 to 0.002 at 1: kept, -2. 0.5 to 0.7 at 1: moved 0.2, dropped. 0.5 to 0.7 at -1: kept, 1.4. 0.9 to 0.74 at -1:
    dropped, though the ratio is 0.82. 0.01 to 0.3 at -1: kept, 30, of which 20 count. 0.5 to 0.64 at 1: kept, -1.28.
    """
    mu, pi = [[0.001, 0.5, 0.5, 0.9, 0.01, 0.5, NAN]], [[0.002, 0.7, 0.7, 0.74, 0.3, 0.64, NAN]]
    batch = batch_of([[1, 1, -1, -1, -1, 1, NAN]], 0.5, mu=mu, old=[[0.2] * 7])
    loss, gradient, sums, clipped = trained(Dppo(Dppo.Config()), batch, pi)
    assert loss == pytest.approx(0.5 * (-2 + 1.4 + 20 - 1.28), rel=1e-5)
    assert gradient[0] == pytest.approx([-1, 0, 0.7, 0, 10, -0.64, 0], rel=1e-5)
    assert clipped == [[False, True, False, True, False, False, False]]
    assert sums["moved"] == pytest.approx(0.001 + 0.2 + 0.2 + 0.16 + 0.29 + 0.14)
    wide = Dppo(Dppo.Config(delta=0.17, max_ratio=50.0))
    assert trained(wide, batch, pi)[0] == pytest.approx(0.5 * (-2 + 1.4 + 0.74 / 0.9 + 30 - 1.28), rel=1e-5)


# --- gmpo -------------------------------------------------------------------------------------------------------------

GMPO = Gmpo(Gmpo.Config())
PI = [[0.1 * math.exp(0.1), 0.1 * math.exp(0.6), NAN], [0.1 * math.exp(-0.3), NAN, 0.1 * math.exp(-0.8)]]
"""Log-ratios 0.1, 0.6 in one row of the play and -0.3, -0.8 in the other."""
OLD = [[0.1, 0.1, NAN], [0.1, NAN, 0.1]]


@pytest.mark.parametrize(
    ("sign", "mean", "clipped"),
    [
        (1.0, (0.1 + 0.4 - 0.3 - 0.8) / 4, [[False, True, False], [False, False, False]]),
        (-1.0, (0.1 + 0.6 - 0.3 - 0.4) / 4, [[False, False, False], [False, False, True]]),
    ],
)
def test_gmpo_loss(sign: float, mean: float, clipped: list[list[bool]]) -> None:
    """The weight 1/4 of sequence-mean: the loss is -g A, and each unclipped token's gradient -g A / 4."""
    batch = batch_of([[sign, sign, NAN], [sign, NAN, sign]], 1 / 4, old=OLD)
    loss, gradient, _, found = trained(GMPO, batch, PI)
    assert loss == pytest.approx(-sign * math.exp(mean))
    each = -sign * math.exp(mean) / 4
    sampled = [[True, True, False], [True, False, True]]
    expected = [
        [each * (s and not c) for s, c in zip(*rows, strict=True)] for rows in zip(sampled, clipped, strict=True)
    ]
    assert np.array(gradient) == pytest.approx(np.array(expected))
    assert found == clipped


def test_gmpo_gradient_is_that_of_the_written_formula() -> None:
    """-A exp(mean of the clipped log-ratios), differentiated as it stands."""
    ratio_T = torch.tensor([0.1, 0.6, -0.3, -0.8], requires_grad=True)
    (expected,) = torch.autograd.grad(-2 * ratio_T.clamp(max=0.4).mean().exp(), ratio_T)
    _, gradient, _, _ = trained(GMPO, batch_of([[2.0, 2.0, NAN], [2.0, NAN, 2.0]], 1 / 4, old=OLD), PI)
    assert [gradient[0][0], gradient[0][1], gradient[1][0], gradient[1][2]] == pytest.approx(expected.tolist())


def test_gmpo_needs_the_whole_play() -> None:
    """Each row for itself has another mean: the check would be blind if the rows' means were equal."""
    whole = trained(GMPO, batch_of([[1.0, 1.0, NAN], [1.0, NAN, 1.0]], 1 / 4, old=OLD), PI)[0]
    parts = [
        trained(GMPO, batch_of([a], 1 / 4, old=[o]), [p])[0]
        for a, o, p in zip([[1.0, 1.0, NAN], [1.0, NAN, 1.0]], OLD, PI, strict=True)
    ]
    assert abs(whole - sum(parts)) > 0.01


def test_defaults_are_the_papers() -> None:
    assert (M2po.Config().threshold, Dppo.Config().delta) == (0.04, 0.15)
    assert (Gmpo.Config().log_clip_low, Gmpo.Config().log_clip_high) == (0.4, 0.4)
    assert Gmpo.Config().aggregation == "sequence-mean"
