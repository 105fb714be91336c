"""How many groups a stage claims at once: as many as never depends on timing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from relax_core.annotators import groups_at_once
from relax_core.config.resolve import resolve
from relax_core.testing.runs import TEXT_RUN


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"groups_per_step": 16, "updates_per_step": 2}, (8, True, "started")),  # training may begin after half of them
        (
            {"groups_per_step": 16, "updates_per_step": 2, "algorithm": {"id": "grpo", "whiten": True}},
            (16, True, "started"),
        ),
        ({"groups_per_step": 16, "plugins": ["algorithms-extra"], "algorithm": {"id": "m2po"}}, (16, True, "started")),
    ],
    ids=str,
)
def test_with_an_old_policy_of_its_own_only_whole_steps_are_awaited(
    changes: dict[str, Any], claim: tuple[int, bool, str]
) -> None:
    config, stack = resolve(copy.deepcopy(TEXT_RUN) | changes)
    algorithm = stack.build("algorithms", config.algorithm, where="algorithm")
    assert groups_at_once(config, algorithm, old_apart=True) == claim
    assert groups_at_once(config, algorithm) == (16, True, "started")


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"groups_per_step": 4}, (4, True, "started")),
        ({"groups_per_step": 16}, (8, True, "started")),  # training may begin after half of them
        ({"groups_per_step": 15}, (5, True, "started")),  # a part of a step's groups, so that no claim spans two steps
        ({"groups_per_step": 17}, (1, True, "started")),
        ({"groups_per_step": 17, "updates_per_step": 2}, (17, True, "started")),  # the trainer waits for all of them
        ({"groups_per_step": 17, "updates_per_step": 2, "old": "engine"}, (1, True, "started")),
        ({"groups_per_step": 17, "algorithm": {"id": "grpo", "whiten": True}}, (17, True, "started")),
        ({"groups_per_step": 4, "order": "finished", "max_staleness": 1}, (1, False, "any")),
    ],
    ids=str,
)
def test_groups_at_once(changes: dict[str, Any], claim: tuple[int, bool, str]) -> None:
    config, stack = resolve(copy.deepcopy(TEXT_RUN) | changes)
    algorithm = stack.build("algorithms", config.algorithm, where="algorithm")
    assert groups_at_once(config, algorithm) == claim
