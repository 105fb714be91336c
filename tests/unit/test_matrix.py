"""Any two algorithms differ: on one fixed batch with ratios other than 1, each has a gradient of its own."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from relax_core.plugins import Stack, activate, installed_plugins
from relax_core.testing.algorithm_checks import evaluate, example_rows, scored_group

PLUGINS = [name for name in ("algorithms-extra",) if name in {entry.name for entry in installed_plugins()}]
DEFAULTS: dict[str, dict[str, Any]] = {"dr-grpo": {"constant": 12}}
"""What an algorithm cannot do without."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("reinforce++", {"baseline": True}),
    ("rloo", {"clip": False}),
    ("opd", {"reward_weight": 1.0}),
]
LEAST = 1e-4
BATCH: dict[str, list[tuple[float, list[str]]]] = {
    "a": [(1.0, ["." + 20 * "#"]), (0.0, ["." + 12 * "#"]), (0.25, ["#", ".##.#####"]), (0.0, [".####..#########"])],
    "b": [(0.5, [".#####"]), (1.0, ["..##.###############"]), (0.0, [16 * "#"]), (1.0, ["." + 14 * "#"])],
}
"""Long enough for every part of the losses: ratios from 0.6 to 1.6, and between any two bounds."""


def gradient(stack: Stack, id: str, settings: dict[str, Any]) -> NDArray[np.float32]:
    """Of the loss with respect to each log-prob, one after the other."""
    cls = stack.load("algorithms", id)
    algorithm = cls(cls.Config.model_validate(settings))
    groups = [scored_group(name, members, algorithm.needs) for name, members in BATCH.items()]
    return evaluate(algorithm, example_rows(algorithm, groups)).gradients["logprobs"]


def assert_all_differ(gradients: dict[str, NDArray[np.float32]]) -> None:
    assert len(gradients) > 1
    for (name, one), (other, two) in combinations(gradients.items(), 2):
        distance = np.abs(one - two).max()
        assert distance > LEAST, f"{name} and {other} differ by {distance:.1e} at most"


def test_as_they_come() -> None:
    stack = activate(PLUGINS)
    found = {id: gradient(stack, id, DEFAULTS.get(id, {})) for id in stack.components("algorithms")}
    variants = {f"{id} {settings}": gradient(stack, id, settings) for id, settings in VARIANTS}
    assert_all_differ(found | variants)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_under_one_aggregation(aggregation: str) -> None:
    """So that it is not the aggregation alone in which they differ. One that refuses this aggregation stays out."""
    stack = activate(PLUGINS)
    found: dict[str, NDArray[np.float32]] = {}
    for id, settings in [*((id, {}) for id in stack.components("algorithms")), *VARIANTS]:
        try:
            found[f"{id} {settings}"] = gradient(stack, id, {**settings, "aggregation": aggregation})
        except ValidationError as error:
            assert "aggregation" in str(error)
    assert len(found) >= 10
    assert_all_differ(found)


def test_two_that_are_the_same_are_seen() -> None:
    stack = activate(PLUGINS)
    twins = {"grpo": gradient(stack, "grpo", {}), "dapo": gradient(stack, "dapo", {"clip_high": 0.2})}
    with pytest.raises(AssertionError, match=r"grpo and dapo differ by 0\.0e"):
        assert_all_differ(twins)
