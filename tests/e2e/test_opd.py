"""Distillation as a run: a tiny random student comes to say what a tiny random teacher of another seed would say."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import ConfigError
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import WORDS, accounted, metrics, run_file, summary, train

CONFIG = Path(__file__).parents[2] / "configs" / "opd-tiny.yaml"
ECHO = f'''
"""Ten tasks, one for each word, answered by one token; the reward is for the task's own word."""
from relax_core.interfaces import Component, Environment
from relax_core.types import Task, user


class Echo(Environment):
    def tasks(self, split):
        return [Task(word, (user(f"last of {{word}} ?"),), word) for word in {WORDS!r}]


def relax_environments():
    return {{"echo": Component("opd_echo_plugin:Echo")}}
'''
TINY = {"words": ["last", "of", "?", *WORDS], "hidden": 32, "layers": 1}
TEACHER = {"id": "text", "tiny": {**TINY, "seed": 1, "init_std": 0.3}}
"""Far from uniform, and from the student: at the start KL(student || teacher) is 1.4."""
STEPS = {"sampled": 36, "topk": 14, "full": 14}
"""Budgets of steps of ten tasks; a sampled token says less than a distribution, so its groups are larger, too."""
PLAYS = {"sampled": 8, "topk": 1, "full": 1}


def distil(folder: Path, monkeypatch: pytest.MonkeyPatch, over: str, **changes: Any) -> list[dict[str, Any]]:
    """Train; the metrics of each step. Changes of the algorithm are given by its settings."""
    installed = installed_plugins()
    write_plugin(folder / "plugins", "opd_echo", ECHO)
    monkeypatch.syspath_prepend(str(folder / "plugins"))
    monkeypatch.delitem(sys.modules, "opd_echo_plugin", raising=False)
    settings: dict[str, Any] = {
        "plugins": ["opd_echo"],
        "steps": STEPS[over],
        "groups_per_step": len(WORDS),
        "group_size": PLAYS[over],
        "model": {"id": "text", "tiny": TINY},
        "environments": [{"id": "echo"}],
        "rewards": [{"id": "exact"}],
        "algorithm": {"id": "opd", "over": over, **changes.pop("algorithm", {})},
        "stages": [{"id": "teacher", "model": TEACHER, **({"top_k": 8} if over == "topk" else {})}],
        "sampling": {"max_new_tokens": 1},
        "trainer": {"lr": 6e-3, "betas": [0.9, 0.95]},
        "evaluation": [],
        "checkpoint": {"every": 1000},
        "trajectories": {"every": 1000},
    }
    directory = train(
        run_file(folder, **{**settings, **changes}), installed=(*installed, *plugins_in(folder / "plugins"))
    )
    assert accounted(summary(directory)["groups"])
    return [line for line in metrics(directory) if line["kind"] == "train"]


def ends(lines: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Means of a metric over the first and the last two steps."""
    values = [line[name] for line in lines]
    return statistics.fmean(values[:2]), statistics.fmean(values[-2:])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("over", STEPS)
def test_the_student_becomes_like_its_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    """The reverse KL per token falls from about 1 to below a fifth; groups of one do where distributions are given."""
    first, last = ends(distil(tmp_path, monkeypatch, over), "train/kl_teacher")
    assert first > 0.7
    assert last < first / 5


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("beta", [None, 0.1, 0.9], ids=["forward", "like forward", "like reverse"])
@pytest.mark.parametrize("over", ["topk", "full"])
def test_every_divergence_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str, beta: float | None) -> None:
    settings: dict[str, Any] = {"divergence": "jsd", "beta": beta} if beta else {"divergence": "forward"}
    lines = distil(tmp_path, monkeypatch, over, algorithm=settings, steps=30)
    for name in ("train/kl_teacher", "train/divergence"):
        first, last = ends(lines, name)
        assert 0 <= last < first / 5, name


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("over", STEPS)
def test_with_several_updates_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    """From the second update on tokens are weighted by the ratio; half as many steps do."""
    steps = STEPS[over] // 2
    lines = distil(tmp_path, monkeypatch, over, updates_per_step=4, epochs=2, steps=steps)
    first, last = ends(lines, "train/kl_teacher")
    assert last < first / 5
    assert all(line["train/ratio"] != 1 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("over", STEPS)
def test_with_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    """The reward rises above 0.4 from a tenth, and the stronger the teacher weighs, the nearer the student stays."""
    found = {}
    for weight in (0.1, 0.5):
        settings = {"reward_weight": 1.0, "weight": weight}
        folder = tmp_path / str(weight)
        lines = distil(folder, monkeypatch, over, algorithm=settings, steps=25, group_size=8)
        found[weight] = (ends(lines, "reward"), ends(lines, "train/kl_teacher")[1])
    (first, last), far = found[0.1]
    assert first < 0.15 and last > 0.4
    assert found[0.5][1] < far / 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_shipped_run_file(tmp_path: Path) -> None:
    """Two words a reply, and more prompts than it sees twice."""
    directory = train(CONFIG, [f"runs={tmp_path}"])
    first, last = ends([line for line in metrics(directory) if line["kind"] == "train"], "train/kl_teacher")
    assert last < first / 5


@pytest.mark.timeout(30)
def test_a_teacher_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"stages: opd needs teacher_logprobs .* write stages"):
        distil(tmp_path, monkeypatch, "sampled", stages=[])
