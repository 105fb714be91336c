"""The plugin algorithms-extra: promises that all its algorithms keep, settings that they refuse, and whole runs."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_algorithms.testing import aggregations
from relax_core.config.schema import RunConfig
from relax_core.errors import DataError
from relax_core.interfaces import Algorithm
from relax_core.replay import main as replay
from relax_core.testing.algorithm_checks import check_algorithm, evaluate, example_rows, scored_group
from relax_core.testing.runs import accounted, metrics, run_file, summary, train
from relax_core.types import Trajectory
from relax_envs.rewards.format import Format
from relax_plugin_algorithms_extra.dppo import Dppo
from relax_plugin_algorithms_extra.gdpo import Gdpo
from relax_plugin_algorithms_extra.gmpo import Gmpo
from relax_plugin_algorithms_extra.m2po import M2po
from relax_plugin_algorithms_extra.maxrl import Maxrl
from relax_plugin_algorithms_extra.plugin import relax_algorithms

NAN = math.nan
ALL: dict[str, type[Algorithm]] = {"maxrl": Maxrl, "gdpo": Gdpo, "m2po": M2po, "dppo": Dppo, "gmpo": Gmpo}
AGGREGATIONS = aggregations()
OPTIONS: list[dict[str, Any]] = [
    {"entropy": {"start": 0.1, "end": 0.01, "steps": 10}, "rejection": {"low": 0.9, "high": 1.1}},
    {"kl": {"coefficient": 0.1}, "opsm": 0.05},
]


def made(id: str, **settings: Any) -> Algorithm:
    return ALL[id](ALL[id].Config.model_validate(settings))


def problems(id: str, settings: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    base: dict[str, Any] = {
        "name": "test",
        "steps": 1,
        "groups_per_step": 1,
        "model": {"id": "text"},
        "environments": ({"id": "last-word"},),
        "rewards": ({"id": "exact"}, {"id": "format", "name": "form"}),
        "algorithm": {"id": id},
    }
    config = ALL[id].Config.model_validate(settings or {})
    return list(ALL[id].check(config, RunConfig.model_validate({**base, **changes})))


# --- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("id", ALL)
def test_keeps_the_promises_of_every_algorithm(id: str, settings: dict[str, Any]) -> None:
    """Cuts, padding, masked values, untrained and awkward rows, and -A x grad log p at ratio one."""
    check_algorithm(made(id, **settings))


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
@pytest.mark.parametrize("id", ALL)
def test_keeps_them_with_options(id: str, settings: dict[str, Any]) -> None:
    check_algorithm(made(id, **settings))


@pytest.mark.parametrize("id", ["maxrl", "gdpo", "gmpo"])
def test_keeps_them_with_a_correction(id: str) -> None:
    check_algorithm(made(id, correction={"kind": "truncate", "high": 1.2, "level": "sequence"}))


@pytest.mark.parametrize("id", ALL)
def test_no_two_aggregations_agree(id: str) -> None:
    updates = [evaluate(a, example_rows(a)) for a in (made(id, **settings) for settings in AGGREGATIONS)]
    for one, other in combinations(updates, 2):
        assert np.abs(one.gradients["logprobs"] - other.gradients["logprobs"]).max() > 1e-3


def test_no_two_of_them_agree() -> None:
    """Nor with GRPO: off policy every gradient differs. Two rewards, so that gdpo has something to decouple."""
    from relax_algorithms.grpo import Grpo

    rewards = [{"a": 1.0, "b": 0.25}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.5}, {"a": 1.0, "b": 0.0}]
    lengths = (1, 9, 4, 6)
    groups = [scored_group("g", [(r, ["." + n * "#"]) for r, n in zip(rewards, lengths, strict=True)])]
    algorithms: list[Algorithm] = [Grpo(Grpo.Config()), *(made(id) for id in ALL)]
    updates = [evaluate(algorithm, example_rows(algorithm, groups)) for algorithm in algorithms]
    for one, other in combinations(updates, 2):
        assert np.abs(one.gradients["logprobs"] - other.gradients["logprobs"]).max() > 1e-3


@pytest.mark.parametrize("id", ALL)
def test_equal_rewards_and_abstentions_give_exactly_nothing(id: str) -> None:
    """Seven rewards of 0.1, whose mean is not 0.1 in floating point; and a group in which nobody has one."""
    equal = [(0.1, ["." + n * "#"]) for n in range(1, 8)]
    for members in (equal, [(None, [".##"]), (None, [".#"])]):
        algorithm = made(id)
        update = evaluate(algorithm, example_rows(algorithm, [scored_group("a", members)]), garbage=NAN)
        assert update.loss == 0 and not any(gradient.any() for gradient in update.gradients.values())


@pytest.mark.parametrize("id", ALL)
def test_has_a_page(id: str) -> None:
    about = ALL[id].about
    assert about is not None and all([about.formula, about.papers, about.use, about.defaults])
    assert relax_algorithms()[id].target == f"{ALL[id].__module__}:{ALL[id].__qualname__}"


def test_all_but_the_loss_works_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from relax_core.testing.algorithm_checks import check_columns
from relax_core.testing.algorithm_checks import example_rows
from relax_core.plugins import activate
stack = activate(["algorithms-extra"])
for id in "maxrl gdpo m2po dppo gmpo".split():
    cls = stack.load("algorithms", id)
    check_columns(cls(cls.Config()))
    cls(cls.Config()).prepare(example_rows(cls(cls.Config())))
    print(id)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == list(ALL), done.stderr


# --- settings ---------------------------------------------------------------------------------------------------------

BONUS = {"coefficient": 0.1, "place": "reward"}


@pytest.mark.parametrize(
    ("id", "settings", "said"),
    [
        ("maxrl", {"kl": BONUS}, "makes it negative, which maxrl refuses: take 'loss'"),
        ("gdpo", {"kl": BONUS}, "has no sum to take it from: take 'loss'"),
        ("gdpo", {"whiten": True}, "whiten: gdpo always divides by the step's deviation: leave it out"),
        ("gdpo", {"weights": {"exact": "1"}}, "weights.exact"),
        ("m2po", {"correction": {"kind": "truncate"}}, "rho would count mu twice: leave it out"),
        ("m2po", {"clip_high": 0.2}, "clip_high: m2po masks outliers instead of clipping the ratio"),
        ("m2po", {"threshold": 0.0}, "threshold"),
        ("dppo", {"correction": {"kind": "mask"}}, "rho would count mu twice: leave it out"),
        ("dppo", {"dual_clip": 3.0}, r"dual_clip: dppo bounds the difference of probabilities \(delta\)"),
        ("dppo", {"delta": 1.0}, "delta"),
        ("dppo", {"max_ratio": 1.0}, "max_ratio"),
        ("gmpo", {"clip_low": 0.2}, "clip_low: gmpo clips the log of the ratio: set log_clip_low"),
        ("gmpo", {"dual_clip": 3.0}, "dual_clip: gmpo bounds what outliers weigh by its mean"),
        ("gmpo", {"log_clip_low": -0.4}, "log_clip_low"),
    ],
)
def test_wrong_settings(id: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        made(id, **settings)


@pytest.mark.parametrize("id", ALL)
def test_a_group_of_one_is_refused(id: str) -> None:
    (line,) = problems(id, group_size=1)
    assert "group_size is 1" in line and not problems(id, group_size=2)


def test_m2po_needs_the_old_policy() -> None:
    assert "old_logprobs" in made("m2po").needs
    (line,) = problems("m2po", old="engine")
    assert "old is engine" in line and line.endswith("set recompute")
    assert not problems("dppo", old="engine")


def test_gdpo_names_the_rewards() -> None:
    (line,) = problems("gdpo", {"weights": {"forms": 2.0, "exact": 1.0}})
    assert line == "weights: no reward is named 'forms'; did you mean 'form'?; there is exact, form"
    assert not problems("gdpo", {"weights": {"form": 2.0}})


def test_gdpo_does_not_seek_a_penalty() -> None:
    rewards = ({"id": "exact"}, {"id": "format", "weight": -0.5})
    (line,) = problems("gdpo", rewards=rewards)
    assert "'format' has weight -0.5" in line and "such as {format: -0.5}" in line
    assert not problems("gdpo", {"weights": {"format": -1.0}}, rewards=rewards)


@pytest.mark.parametrize("id", ["m2po", "dppo"])
def test_stale_data_needs_no_correction_here(id: str) -> None:
    """Other policy gradients are told about ``correction`` in a run with old data; these refuse it."""
    config = ALL[id].Config()
    base = {"name": "a", "steps": 1, "groups_per_step": 1, "model": {"id": "text"}, "max_staleness": 4}
    sections = {"environments": ({"id": "last-word"},), "rewards": ({"id": "exact"},), "algorithm": {"id": id}}
    assert not list(ALL[id].notes(config, RunConfig.model_validate({**base, **sections})))


# --- runs -------------------------------------------------------------------------------------------------------------


def trained(folder: Path, id: str, **changes: Any) -> Path:
    settings = {"plugins": ["algorithms-extra"], "steps": 2, "updates_per_step": 2, "evaluation": []}
    return train(run_file(folder, **{**settings, "algorithm": {"id": id}, **changes}))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("id", ALL)
def test_a_run(tmp_path: Path, id: str) -> None:
    weights = {"weights": {"exact": 0.8, "format": 0.2}} if id == "gdpo" else {}
    directory = trained(tmp_path, id, algorithm={"id": id, **weights})
    lines = [line for line in metrics(directory) if "train/loss" in line]
    assert len(lines) == 2 and accounted(summary(directory)["groups"])
    for line in lines:
        numbers = {key: value for key, value in line.items() if key.startswith("train/")}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert 0 <= numbers["train/clipped"] <= 1 and numbers["train/updates"] + numbers["train/skipped"] == 2
    own = {"m2po": "train/m2", "dppo": "train/moved"}  # present in steps that have such tokens
    assert [key for key in own.values() if any(key in line for line in lines)] == ([own[id]] if id in own else [])


@pytest.mark.timeout(60)
def test_a_replay_finds_the_same_mask(tmp_path: Path) -> None:
    """What ``prepare`` makes of a step is made again, to the last bit. A tiny threshold masks most of what it can.

    Only tokens of an older policy are masked; timing decides in which steps there are any.
    """
    changes = {"trainer": {"lr": 3e-2}, "max_staleness": 2, "steps": 8}
    directory = trained(tmp_path, "m2po", algorithm={"id": "m2po", "threshold": 1e-4}, **changes)
    masked = [line["step"] - 1 for line in metrics(directory) if line.get("train/clipped", 0) > 0]
    assert masked
    assert replay(directory, masked[0]) == 0


@pytest.mark.timeout(60)
def test_a_negative_reward_ends_a_maxrl_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fine(self: Format, trajectory: Trajectory) -> float:
        return -1.0 if trajectory.turns else 0.0

    monkeypatch.setattr(Format, "__call__", fine)
    with pytest.raises(DataError, match=r"^algorithm maxrl: a play of task '.+' has the reward -1; .*or take grpo$"):
        trained(tmp_path, "maxrl", rewards=[{"id": "format", "words": 1}])
