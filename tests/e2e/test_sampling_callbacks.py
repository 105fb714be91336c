"""Runs with dynamic sampling, overlong penalties and masking: refilled, accounted for, repeatable, ended in time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import PluginError, RelaxError
from relax_core.testing.runs import TEXT_RUN, accounted, in_child, metrics, run_file, summary, train

RUN: dict[str, Any] = {
    "steps": 6,
    "group_size": 2,
    "evaluation": [],
    "callbacks": [{"id": "overlong", "limit": 3, "buffer": 2, "weight": 0.1}, {"id": "dynamic-sampling"}],
}
"""Two plays of a task often agree: about every second group is filtered."""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed run."""
    return train(run_file(tmp_path_factory.mktemp("sampled"), **RUN))


def plays_by_group(directory: Path) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in sorted(directory.glob("trajectories/*.jsonl")):
        for play in map(json.loads, file.open()):
            groups.setdefault((file.name, play["task"]["id"]), []).append(play)
    return groups


def test_every_step_has_all_its_groups_and_all_of_them_differ(sampled: Path) -> None:
    groups = plays_by_group(sampled)
    assert len(groups) == 6 * 4
    for plays in groups.values():
        assert len(plays) == 2 and len({play["raw_reward"] for play in plays}) == 2
    lines = metrics(sampled)
    assert [line["groups/trained"] for line in lines] == [4, 8, 12, 16, 20, 24]
    filtered = [line["groups/filtered"] for line in lines]
    assert filtered == sorted(filtered) and filtered[-1] > 4, filtered
    for line in lines:
        assert line["groups/issued"] == line["groups/trained"] + line["groups/filtered"]
    found = summary(sampled)["groups"]
    assert accounted(found) and found["filtered"] == filtered[-1] and found["failed"] == found["in_flight"] == 0
    reasons = summary(sampled)["filtered_because"]
    assert sum(reasons.values()) == filtered[-1] and all(reason.startswith("all rewards are") for reason in reasons)


def test_the_penalty_is_in_the_reward_and_not_in_the_raw_one(sampled: Path) -> None:
    """L = 3, B = 2: one token costs nothing, two half of it, three all."""
    seen = set()
    for play in (play for plays in plays_by_group(sampled).values() for play in plays):
        tokens = sum(turn["tokens"] for turn in play["turns"])
        seen.add(tokens)
        assert play["reward"] == pytest.approx(play["raw_reward"] - 0.1 * (tokens - 1) / 2)
    assert {1, 2, 3} >= seen and len(seen) > 1


def test_two_runs_are_equal(sampled: Path, tmp_path: Path) -> None:
    assert metrics(train(run_file(tmp_path, **RUN))) == metrics(sampled)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["filter_group", "save"])
def test_killed_and_started_again(sampled: Path, tmp_path: Path, where: str) -> None:
    """In the middle of a step, after groups of it were filtered; and right after a checkpoint."""
    path = run_file(tmp_path, **RUN)

    def work() -> None:
        from relax_algorithms.callbacks.dynamic_sampling import DynamicSampling
        from relax_core.system import System

        filter_group, save, calls = DynamicSampling.filter_group, System.save, []

        def count(name: str, lethal: int) -> None:
            calls.append(name)
            if name == where and calls.count(name) == lethal:
                os.kill(os.getpid(), signal.SIGKILL)

        def filters(self: Any, run: Any, value: Any, event: Any) -> str | None:
            found = filter_group(self, run, value, event)
            count("filter_group", 40)
            return found

        async def saves(self: Any, version: int) -> None:
            await save(self, version)
            count("save", 2)

        DynamicSampling.filter_group, System.save = filters, saves  # type: ignore[method-assign]
        train(path)

    assert in_child(work, limit_s=60) == -signal.SIGKILL
    directory = train(path)
    assert metrics(directory) == metrics(sampled)
    assert summary(directory)["groups"] == summary(sampled)["groups"]


@pytest.mark.parametrize("staleness", [1, 2])
def test_asynchronous(tmp_path: Path, staleness: int) -> None:
    found = summary(train(run_file(tmp_path, **RUN, max_staleness=staleness)))
    assert found["groups"]["trained"] == 24 and found["groups"]["filtered"] > 0
    assert accounted(found["groups"]) and found["max_lag"] <= staleness and found["groups"]["evicted"] == 0


def test_a_run_in_which_no_group_is_kept_ends(tmp_path: Path) -> None:
    """min_mean above every possible mean: 2 x 4 groups in a row."""
    callbacks = [{"id": "dynamic-sampling", "min_mean": 2.0, "max_attempts": 2}]
    with pytest.raises(RelaxError, match=r"callbacks\.0 .*: filter_group failed: dynamic-sampling: 8 groups in a row"):
        train(run_file(tmp_path, **RUN | {"callbacks": callbacks}))


def test_the_count_is_part_of_a_checkpoint(sampled: Path) -> None:
    for folder in sorted(sampled.glob("checkpoints/step-*")):
        state = json.loads((folder / "state.json").read_text())["callbacks"]["callbacks.1"]
        assert set(state) == {"in_a_row"} and all(count > 0 for count in state["in_a_row"].values())


def test_plays_that_were_cut_off_are_not_trained(tmp_path: Path) -> None:
    """Groups in which every play was are filtered, not failed."""
    directory = train(run_file(tmp_path, **RUN | {"callbacks": [{"id": "mask-truncated"}], "steps": 3}))
    masked = 0
    for plays in plays_by_group(directory).values():
        assert any(play["reward"] is not None for play in plays)
        for play in plays:
            assert (play["reward"] is None) == (play["stop"] == "length") == bool(play["metrics"]["masked"])
            masked += play["reward"] is None
    found = summary(directory)["groups"]
    assert masked > 0 and found["trained"] == 12 and accounted(found) and found["failed"] == 0


def test_a_run_whose_every_play_is_cut_off_ends(tmp_path: Path) -> None:
    """One token a play, and it is hardly ever the one that ends a reply: there are hundreds of words."""
    tiny = TEXT_RUN["model"]["tiny"]
    words = [*tiny["words"], *(f"w{i}" for i in range(500))]
    changes: dict[str, Any] = {
        "callbacks": [{"id": "mask-truncated"}],
        "sampling": {"max_new_tokens": 1},
        "model": {"id": "text", "tiny": {**tiny, "words": words}},
    }
    with pytest.raises(RelaxError, match=r"nothing of the last 20 groups .* shape_rewards left none of them a reward"):
        train(run_file(tmp_path, **RUN | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "callbacks.1: group_size is 1"),
        (
            {"callbacks": [{"id": "overlong", "limit": 3, "buffer": 4}]},
            "callbacks.0: buffer: found 4, more than limit 3",
        ),
        ({"callbacks": [{"id": "dynamic-samplin"}]}, "did you mean 'dynamic-sampling'"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((RelaxError, PluginError), match=message):
        train(run_file(tmp_path, **RUN | changes))
