"""Every algorithm with every option: it works and changes something, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import Options, problems
from relax_core.config.schema import RunConfig
from relax_core.interfaces import Algorithm
from relax_core.plugins import Stack, activate
from relax_core.testing import algorithm_checks as checks
from relax_core.testing.algorithm_checks import evaluate, example_rows, scored_group

STACK: Stack = activate(())
IDS = list(STACK.components("algorithms"))

MINIMAL: dict[str, dict[str, Any]] = {
    "dr-grpo": {"aggregation": "constant", "constant": 16},
    "opd": {"reward_weight": 1.0},  # some options concern the reward's part
}
"""What an algorithm needs set."""
WIDE: dict[str, dict[str, Any]] = {
    "gspo": {
        "clip_low": 0.5,
        "clip_high": 0.5,
    },  # by default nearly everything is clipped, and nothing is left to weigh
}
"""What lets the examples, whose ratios lie far from 1, have a gradient."""
DISTILLATION = frozenset({"opd"})
"""Whose gradient on policy is not -A x grad log p with the advantages of the batch."""
ON = {("ppo", "whiten"), ("reinforce++", "whiten")}
"""Options that are on by default."""

AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"aggregation": "token-mean", "constant": None},
    "sequence-mean": {"aggregation": "sequence-mean", "constant": None},
    "sequence-sum": {"aggregation": "sequence-sum", "constant": None},
    "constant": {"aggregation": "constant", "constant": 7},
    "prompt-mean": {"aggregation": "prompt-mean", "constant": None},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "whiten": {"whiten": True},
    "kl k2": {"kl": {"coefficient": 0.3, "estimator": "k2"}},
    "kl k3": {"kl": {"coefficient": 0.3, "estimator": "k3"}},
    "kl k2 unbiased": {"kl": {"coefficient": 0.3, "estimator": "k2", "unbiased": True}},
    "kl k3 unbiased": {"kl": {"coefficient": 0.3, "unbiased": True}},
    "kl reward": {"kl": {"coefficient": 0.3, "place": "reward"}},
    "entropy": {"entropy": {"start": 0.1, "end": 0.01, "steps": 10}},
    "truncate token": {"correction": {"kind": "truncate", "high": 1.1}},
    "truncate sequence": {"correction": {"kind": "truncate", "level": "sequence", "high": 1.1}},
    "mask token": {"correction": {"kind": "mask", "low": 0.9, "high": 1.2}},
    "mask sequence": {"correction": {"kind": "mask", "level": "sequence", "low": 0.8, "high": 1.5}},
    "decoupled token": {"correction": {"kind": "decoupled"}},
    "decoupled sequence": {"correction": {"kind": "decoupled", "level": "sequence"}},
    "reject mean": {"rejection": {"by": "geometric-mean", "low": 0.95, "high": 1.05}},
    "reject product": {"rejection": {"by": "product", "low": 0.8, "high": 1.2}},
    "opsm": {"opsm": 0.02},
    "clip": {"clip_low": 0.05, "clip_high": 0.06},
    "dual clip": {"dual_clip": 1.01},
}
TOGETHER: list[list[str]] = [
    ["sequence-mean", "whiten", "truncate sequence", "reject mean", "opsm", "entropy", "kl reward"],
    ["prompt-mean", "mask token", "opsm", "kl k3 unbiased"],
    ["token-mean", "decoupled token", "reject product", "kl k2"],
    ["sequence-sum", "mask sequence", "kl k2 unbiased"],
    ["constant", "truncate token", "entropy", "kl k3"],
    ["sequence-mean", "decoupled sequence"],
]
"""Each option of ``OPTIONS`` that all algorithms have, and each aggregation."""


def gradients(algorithm: Algorithm) -> Mapping[str, Any]:
    """By output, on three tasks with enough tokens that every option has something to act on."""
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0]
    members = [(reward, [".###" + m * "#"]) for m, reward in enumerate(rewards)]
    groups = [scored_group(f"task-{g}", members, algorithm.needs) for g in range(3)]
    return evaluate(algorithm, example_rows(algorithm, groups)).gradients


def refused(id: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Which of the settings the algorithm says make no sense, and why."""
    model = STACK.config_class("algorithms", id)
    assert issubclass(model, Options)
    return {name: reason for name, reason in model.refuses.items() if name in settings}


def built(id: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """With what it needs set. Skips the test where the algorithm refuses the settings."""
    settings = settings or {}
    if refused(id, settings):
        pytest.skip("refused: see test_refusals")
    algorithm: type[Algorithm] = STACK.load("algorithms", id)
    return algorithm(algorithm.Config.model_validate({**MINIMAL.get(id, {}), **settings}))


def test_the_tables_name_what_there_is() -> None:
    assert {*MINIMAL, *WIDE, *DISTILLATION, *(id for id, _ in ON)} <= set(IDS)


@pytest.mark.parametrize("id", IDS)
def test_refusals(id: str) -> None:
    """One line each, with the setting and what to do instead."""
    model = STACK.config_class("algorithms", id)
    assert issubclass(model, Options)
    for name, reason in model.refuses.items():
        with pytest.raises(ValidationError) as error:
            model.model_validate({**MINIMAL.get(id, {}), name: 0.5})
        (found,) = error.value.errors()
        assert found["msg"] == f"Value error, {name}: {reason}"
        assert "\n" not in reason and any(word in reason for word in ("leave", "set", "take", "lower", "raise"))


def check_quickly(id: str, settings: Mapping[str, Any]) -> Algorithm:
    """All checks but that of awkward rows, which takes longer than the others together."""
    algorithm = built(id, settings)
    checks.check_columns(algorithm)
    checks.check_streaming(algorithm)
    checks.check_cuts(algorithm)
    checks.check_masked(algorithm)
    checks.check_untrained(algorithm)
    if id not in DISTILLATION and not kl_in_the_loss(settings):
        checks.check_ratio_one(algorithm)
    return algorithm


def kl_in_the_loss(settings: Mapping[str, Any]) -> bool:
    """It adds a gradient of its own to the policy's."""
    return "kl" in settings and settings["kl"].get("place") != "reward"


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("id", IDS)
def test_aggregations(id: str, name: str) -> None:
    check_quickly(id, AGGREGATIONS[name])


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
@pytest.mark.parametrize("id", IDS)
def test_options_together(id: str, names: list[str]) -> None:
    check_quickly(id, merged(names))


def merged(names: list[str]) -> dict[str, Any]:
    return {key: value for name in names for key, value in (AGGREGATIONS | OPTIONS)[name].items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("id", IDS)
def test_an_option_changes_something(id: str, name: str) -> None:
    if (id, name) in ON:
        pytest.skip("on by default")
    wide = WIDE.get(id, {})
    without, found = gradients(built(id, wide)), gradients(built(id, {**wide, **OPTIONS[name]}))
    assert found.keys() - without.keys() or any(np.abs(found[key] - without[key]).max() > 1e-4 for key in without)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("id", IDS)
def test_awkward_rows(id: str, name: str) -> None:
    checks.check_awkward(built(id, OPTIONS[name]))


def test_off_policy_any_two_algorithms_differ() -> None:
    """On the same rows, whose ratios go from 0.6 to 1.6, and in one aggregation: the formulas are what differs."""
    found = {id: gradients(built(id, AGGREGATIONS["token-mean"]))["logprobs"] for id in IDS}
    for one, other in combinations(found, 2):
        assert np.abs(found[one] - found[other]).max() > 1e-4, f"{one} and {other} have the same gradient"


# --- settings that cannot work, alone or in a run ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "said"),
    [
        ({"low": 0.5}, "low: truncate has no lower bound"),
        ({"kind": "decoupled", "low": 0.5}, "low: decoupled has no lower bound"),
        ({"kind": "decoupled", "high": 2.0}, "high: decoupled takes the weight as it is"),
        ({"kind": "mask", "low": 1.5}, "low 1.5, high 5.0: 1, where both policies agree, must lie between them"),
        ({"kind": "mask", "high": 0.9}, "low 0.5, high 0.9: 1, where both policies agree"),
        ({"high": 0.9}, "high: found 0.9; it must be 1 or more"),
        ({"kind": "clip"}, "truncate"),
    ],
)
def test_wrong_corrections(correction: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Grpo.Config.model_validate({"correction": correction})


@pytest.mark.parametrize("bounds", [(0.5, 0.9), (1.1, 2.0)])
def test_a_rejection_keeps_equal_policies(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="1, where both policies agree, must lie between them"):
        Grpo.Config.model_validate({"rejection": {"low": bounds[0], "high": bounds[1]}})


@pytest.mark.parametrize(
    ("kl", "said"),
    [
        ({"estimator": "k1"}, "k1 in the loss has a gradient of zero mean"),
        ({"place": "reward", "estimator": "k3"}, "k3 as a reward is biased"),
        ({"place": "reward", "unbiased": True}, "a reward needs no such factor"),
        ({"coefficient": 0.0}, "coefficient"),
    ],
)
def test_wrong_penalties(kl: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Grpo.Config.model_validate({"kl": {"coefficient": 0.1, **kl}})


def test_problems_of_a_run() -> None:
    config = Grpo.Config.model_validate({"correction": {}, "rejection": {"low": 0.5, "high": 2.0}, "opsm": 0.1})

    def said(old: str, updates: int) -> list[str]:
        run = cast(RunConfig, SimpleNamespace(old=old, updates_per_step=updates))
        return [line.split(":")[0] for line in problems(config, run)]

    assert said("engine", 1) == ["correction with old", "rejection with old"]
    assert said("recompute", 1) == ["opsm with updates_per_step 1 and old"]
    assert said("recompute", 2) == []
