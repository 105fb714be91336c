"""On-policy distillation: settings, advantages, and what no cut of the batch changes. See also test_opd_losses.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_algorithms.opd import Opd
from relax_algorithms.options import Clipped
from relax_algorithms.plugin import relax_algorithms
from relax_core.interfaces import Streaming
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, scored_group
from relax_core.testing.training import tiny_config

KL = {"coefficient": 0.1}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"reward_weight": 0.5, "weight": 2.0},
    {"reward_weight": 1.0, "whiten": True, "dual_clip": 1.3, "kl": KL | {"place": "reward"}},
    {"correction": {"kind": "truncate"}, "opsm": 0.05, "aggregation": "sequence-mean"},
    {"over": "topk"},
    {"over": "topk", "divergence": "forward", "aggregation": "prompt-mean"},
    {"over": "topk", "divergence": "jsd", "reward_weight": 1.0, "correction": {"kind": "mask"}},
    {"over": "full", "aggregation": "constant", "constant": 12},
    {"over": "full", "divergence": "forward", "kl": KL, "entropy": {"start": 0.1, "end": 0.01, "steps": 10}},
    {"over": "full", "divergence": "jsd", "beta": 0.2, "reward_weight": 1.0, "aggregation": "sequence-sum"},
]


def opd(**settings: Any) -> Opd:
    return Opd(Opd.Config.model_validate(settings))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "needs", "outputs"),
    [
        ({}, {"teacher_logprobs"}, {"logprobs"}),
        ({"over": "topk"}, {"topk_ids", "teacher_topk_logprobs"}, {"logprobs", "topk_logprobs"}),
        ({"over": "full"}, {"teacher_full_logprobs"}, {"logprobs", "full_logprobs"}),
        ({"kl": KL}, {"teacher_logprobs", "ref_logprobs"}, {"logprobs"}),
    ],
)
def test_asks_for(settings: dict[str, Any], needs: set[str], outputs: set[str]) -> None:
    assert opd(**settings).needs == needs
    assert opd(**settings).outputs == outputs


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"divergence": "forward"},
            "over 'sampled' knows one token of each: take divergence 'reverse', or over 'topk'",
        ),
        ({"divergence": "jsd"}, "over 'sampled' knows one token of each"),
        ({"over": "full", "beta": 0.5}, "beta: is for divergence 'jsd', found 'reverse'"),
        ({"over": "full", "divergence": "jsd", "beta": 0.0}, "greater than 0"),
        ({"over": "full", "divergence": "jsd", "beta": 1.0}, "less than 1"),
        ({"clip_high": 0.28}, "clip_high: concerns the advantages of the reward, and reward_weight is 0"),
        ({"clip_low": 0.1}, "clip_low: concerns the advantages of the reward"),
        ({"dual_clip": 3.0}, "dual_clip: concerns the advantages of the reward"),
        ({"whiten": True}, "whiten: concerns the advantages of the reward"),
        ({"kl": KL | {"place": "reward"}}, "kl.place: 'reward' with reward_weight 0 changes nothing"),
        ({"over": "full", "correction": {"kind": "truncate"}}, "correction: weighs sampled tokens"),
        ({"over": "topk", "opsm": 0.1}, "opsm: weighs sampled tokens"),
        ({"over": "topk", "rejection": {"low": 0.9, "high": 1.1}}, "rejection: weighs sampled tokens"),
        ({"weight": 0.0}, "weight"),
        ({"reward_weight": -1.0}, "reward_weight"),
        ({"over": "all"}, "over"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as found:
        opd(**settings)
    assert line in str(found.value)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filled_in_settings_are_settings(settings: dict[str, Any]) -> None:
    """The resolved run file writes every default, and is itself a run file."""
    config = opd(**settings).config
    assert Opd.Config.model_validate(config.model_dump(mode="json")) == config


def test_a_group_of_one() -> None:
    """Distillation compares no plays with each other; a reward does."""
    assert not list(Opd.check(opd().config, tiny_config("opd", group_size=1)))
    (line,) = Opd.check(opd(reward_weight=0.5).config, tiny_config("opd", group_size=1))
    assert "group_size is 1" in line and "reward_weight to 0" in line
    assert not list(Opd.check(opd(reward_weight=0.5).config, tiny_config("opd", group_size=2)))
    (line,) = Opd.check(opd(opsm=0.1).config, tiny_config("opd"))
    assert line.startswith("opsm with updates_per_step 1")


def test_notes_advise_only_what_is_allowed() -> None:
    """A correction is refused where no sampled token is weighed, so nothing is said of it there."""
    late = tiny_config("opd", max_staleness=2)
    assert (
        len([*Opd.notes(opd().config, late)])
        == len([*Opd.notes(opd(over="full", reward_weight=1.0).config, late)])
        == 1
    )
    assert not list(Opd.notes(opd(over="full").config, late))


def test_is_offered() -> None:
    assert relax_algorithms()["opd"].target == "relax_algorithms.opd:Opd"
    assert issubclass(Opd.Config, Clipped) and Opd.about is not None


# --- advantages -------------------------------------------------------------------------------------------------------


def test_advantages() -> None:
    """0 for distillation alone, GRPO's with a reward; a play without a reward is not trained in either."""
    groups = [scored_group("a", [(1.0, [".##"]), (0.0, [".#"]), (None, ["#"])], opd().needs)]
    alone, mixed = opd().advantages(groups), opd(reward_weight=0.5).advantages(groups)
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [x.tolist() for x in (alone["a/0/0"]["advantages"], alone["a/1/0"]["advantages"])] == [[0, 0, 0], [0, 0]]
    assert mixed["a/0/0"]["advantages"] == pytest.approx([0, half, half])
    assert mixed["a/1/0"]["advantages"] == pytest.approx([0, -half])
    for made in (alone, mixed):
        assert [(m["weight"], m["units"]) for m in made.values()] == [(1, 2), (1, 1), (0, 0)]


def test_group_metrics_are_of_the_reward() -> None:
    groups = [scored_group("a", [(1.0, [".##"])], opd().needs)]
    assert opd().group_metrics(groups) == {}
    assert opd(reward_weight=1.0).group_metrics(groups)["groups_of_one"] == (1.0, 1.0)


def test_a_group_of_one_is_trained() -> None:
    rows = example_rows(opd(), [scored_group("a", [(0.0, [".##"])], opd().needs)])
    assert np.abs(evaluate(opd(), rows).gradients["logprobs"]).min() > 0


# --- on the examples of every algorithm -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_keeps_the_promises_of_every_algorithm(settings: dict[str, Any]) -> None:
    """Cuts, padding, masked values, untrained and awkward rows."""
    check_algorithm(opd(**settings), policy_gradient=False)


@pytest.mark.parametrize("reward_weight", [0.0, 0.5])
def test_gradient_at_ratio_one(reward_weight: float) -> None:
    """-(weight (log pi_T - log pi) + reward_weight A) x share, though the engine's log-probs are others."""
    algorithm = opd(weight=2.0, reward_weight=reward_weight, aggregation="sequence-mean")
    rows = [row for row in example_rows(algorithm) if row.columns["weight"]]
    units = sum(row.columns["units"] for row in rows)
    expected = []
    for row in rows:
        c = row.columns
        advantages = 2.0 * (c["teacher_logprobs"] - c["policy_logprobs"]) + reward_weight * c["advantages"]
        expected.append(np.where(c["mask"], -advantages * c["weight"] / units, 0.0)[int(c["mask"].argmax()) :])
    found = evaluate(algorithm, rows, old=False).gradients["logprobs"]
    assert np.abs(found).max() > 0.01
    assert np.abs(found - np.concatenate(expected)).max() < 1e-6


def test_off_policy_tokens_are_weighted() -> None:
    """With old log-probs the gradient is that of ratio one, times the ratio."""
    rows = [row for row in example_rows(opd()) if row.columns["weight"]]
    one, other = (evaluate(opd(), rows, old=old) for old in (False, True))
    ratios = [np.exp(r.columns["policy_logprobs"] - r.columns["old_logprobs"]) for r in rows]
    ratio = np.concatenate([x[int(r.columns["mask"].argmax()) :] for x, r in zip(ratios, rows, strict=True)])
    assert other.gradients["logprobs"] == pytest.approx(one.gradients["logprobs"] * ratio, abs=1e-6)
    assert other.metrics["kl_teacher"] == one.metrics["kl_teacher"]


def test_topk_is_below_full() -> None:
    """On the examples' distributions, whose candidates are the teacher's three likeliest of 50."""
    found = {}
    for over in ("topk", "full"):
        algorithm = opd(over=over)
        total, count = evaluate(algorithm, example_rows(algorithm)).metrics["kl_teacher"]
        found[over] = total / count
    assert 0.1 < found["topk"] < found["full"]


def test_all_settings_differ() -> None:
    losses = [evaluate(a, example_rows(a)).loss for a in (opd(**s) for s in SETTINGS)]
    assert len({round(loss, 5) for loss in losses}) == len(SETTINGS)


def test_streams_unless_whitened() -> None:
    assert opd().streaming is Streaming.SCALE
    assert opd(reward_weight=1.0, whiten=True).streaming is Streaming.BATCH
