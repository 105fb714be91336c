"""The reward ``genrm`` in whole small runs: judges with frozen weights, and the policy as its own judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.testing.runs import TEXT_RUN, WORDS, accounted, metrics, run_file, summary, train

pytestmark = pytest.mark.timeout(110)

DIGITS = ["0", "1", "2", "3", "4", "5"]
POLICY = {
    "id": "text",
    "tiny": {"words": ["last", "of", "?", *WORDS, *DIGITS], "hidden": 32, "layers": 1, "unknown_words": "keep"},
}
JUDGE = {"id": "text", "tiny": {"words": DIGITS, "hidden": 32, "layers": 1, "unknown_words": "keep"}}
VOTES = {"id": "genrm", "scale": [0, 5], "votes": 6, "temperature": 1.0, "max_new_tokens": 2, "min_read": 0.1}
OWN = {**VOTES, "placement": "own", "model": JUDGE}
SHARED = {**VOTES, "placement": "shared"}
PLAYS = "environments/last-word/play/genrm/"


def trained(folder: Path, judge: dict[str, Any] | None, **changes: Any) -> Path:
    """A run of some steps with a judge beside its other rewards."""
    rewards = [*TEXT_RUN["rewards"], *([judge] if judge else [])]
    settings: dict[str, Any] = {"plugins": ["genrm"], "steps": 3, "model": POLICY, "rewards": rewards}
    return train(run_file(folder, **(settings | changes)))


def judged(directory: Path) -> list[dict[str, float]]:
    """Of each step, what was noted of its judgements, and the mean score."""
    lines = [line for line in metrics(directory) if "reward" in line]
    found = [{k.removeprefix(PLAYS): v for k, v in line.items() if k.startswith(PLAYS)} for line in lines]
    return [
        noted | {"score": line.get("environments/last-word/genrm")} for noted, line in zip(found, lines, strict=True)
    ]


def without_judge(directory: Path) -> list[dict[str, Any]]:
    """The metrics of everything but the judge."""
    return [{k: v for k, v in line.items() if "genrm" not in k} for line in metrics(directory)]


def weights(directory: Path) -> dict[str, bytes]:
    """The newest checkpoint's trainer files."""
    newest = max((directory / "checkpoints").iterdir(), key=lambda path: path.name)
    return {
        str(path.relative_to(newest)): path.read_bytes() for path in sorted((newest / "trainer").rglob("*.safetensors"))
    }


def test_a_frozen_judge(tmp_path: Path) -> None:
    directory = trained(tmp_path, {**OWN, "weight": 0.5})
    steps = judged(directory)
    assert len(steps) == 3 and all(step["judgements"] == 6 for step in steps)
    assert all(0 < step["score"] < 1 for step in steps)
    assert all(step["unread/failed"] == step["unread/late"] == 0 for step in steps)
    assert accounted(summary(directory)["groups"])
    (evaluated,) = [line for line in metrics(directory) if "evaluation/held-out/play/genrm/judgements" in line]
    assert evaluated["evaluation/held-out/play/genrm/judgements"] == 6


def test_training_is_the_same_with_and_without_a_judge(tmp_path: Path) -> None:
    """Bit for bit at max_staleness 0, whoever judges and with whatever weights; and judgements repeat."""
    alone = trained(tmp_path / "alone", None)
    own = trained(tmp_path / "own", {**OWN, "weight": 0.0})
    shared = trained(tmp_path / "shared", {**SHARED, "weight": 0.0})
    again = trained(tmp_path / "again", {**SHARED, "weight": 0.0})
    for directory in (own, shared):
        assert all(step["judgements"] == 6 for step in judged(directory))
        assert any(step["score"] is not None for step in judged(directory))
    assert without_judge(own) == without_judge(shared) == without_judge(alone)
    assert weights(own) == weights(shared) == weights(alone) and weights(alone)
    assert metrics(again) == metrics(shared)


@pytest.mark.parametrize("placement", ["resident", "colocate"])
def test_the_policy_judges_ahead_of_its_training(tmp_path: Path, placement: str) -> None:
    """At max_staleness 2 plays are scored while the trainer has the devices, or would be: in ``colocate`` scoring waits
    for the engine's turn, and no judgement is late for that."""
    runtime = {"id": "local", "placement": placement}
    directory = trained(tmp_path, SHARED, max_staleness=2, steps=4, runtime=runtime)
    steps = judged(directory)
    assert len(steps) == 4 and all(step["judgements"] == 6 for step in steps)
    assert all(step["unread/failed"] == step["unread/late"] == 0 for step in steps)
    assert accounted(summary(directory)["groups"]) and summary(directory)["groups"]["trained"] == 16


def test_the_policy_judges_in_colocate_at_staleness_0(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", SHARED, runtime={"id": "local", "placement": "colocate"})
    two = trained(tmp_path / "two", SHARED)
    assert judged(one) == judged(two) and weights(one) == weights(two)


@pytest.mark.parametrize("judge", [OWN, SHARED], ids=["own", "shared"])
def test_engines_in_processes_of_their_own(tmp_path: Path, judge: dict[str, Any]) -> None:
    directory = trained(tmp_path, judge, steps=2, runtime={"id": "local", "overlap": "process"}, max_staleness=1)
    steps = judged(directory)
    assert len(steps) == 2 and all(step["judgements"] == 6 and step["unread/failed"] == 0 for step in steps)


def test_plays_compared_by_the_policy(tmp_path: Path) -> None:
    directory = trained(tmp_path, {**SHARED, "mode": "pairwise", "votes": 2, "min_read": 0.01}, steps=2)
    assert all(0 < step["judgements"] <= 12 for step in judged(directory))
    assert all(step["unread/failed"] == 0 for step in judged(directory))


@pytest.mark.parametrize("judge", [OWN, SHARED], ids=["own", "shared"])
def test_a_judged_step_comes_out_again(
    tmp_path: Path, judge: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen judge is asked again; what the policy said as its own judge is kept: its weights are no more."""
    from relax_core.replay import main

    directory = trained(tmp_path, {**judge, "weight": 0.5}, steps=2, evaluation=[])
    capsys.readouterr()
    assert main(directory, 1) == 0
    text = capsys.readouterr().out
    assert "reward genrm" in text and text.splitlines()[-1] == "everything is equal to the last bit"


def test_a_judge_that_is_never_read_ends_the_run_by_what_it_said(tmp_path: Path) -> None:
    """When it is the only reward, every group fails."""
    from relax_core.errors import RelaxError

    only = {**OWN, "min_read": 1.0, "votes": 8}
    with pytest.raises(
        RelaxError, match=r"every reward abstained; genrm failed \d+ times, the last: .*judgements could be read"
    ):
        train(run_file(tmp_path, plugins=["genrm"], rewards=[only], evaluation=[]))


def test_the_run_file_beside_the_plugin(tmp_path: Path) -> None:
    import relax_plugin_genrm
    from relax_core.config import yaml
    from relax_core.config.resolve import load

    path = Path(relax_plugin_genrm.__file__).parents[1] / "judge.yaml"
    config, _ = load(path)
    assert [section.label for section in config.rewards] == ["exact", "judge"] and yaml.read(path)["steps"] == 40
    directory = train(path, ["steps=2", "groups_per_step=2", "group_size=4", f"runs={tmp_path}"])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["environments/last-word/play/judge/judgements"] == 8
