"""Columns between sampling and training: a plugin's stage makes what a plugin's algorithm needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from relax_core.errors import ConfigError, PluginError, RelaxError
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import metrics, run_file, summary, train

PLUGIN = '''
"""An algorithm that needs the column ``twice``; with STAGE a stage that makes it. Rewards and plays that fail."""
import asyncio

from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Component, ComponentConfig, Reward, Stage
from relax_envs.toy.words import LastWord


class Needy(Grpo):
    needs = frozenset({"twice"})

    def loss(self, batch, outputs):
        assert (batch.columns["twice"] == 2 * batch.logprobs_BT).all()
        return super().loss(batch, outputs)


class Twice(Stage):
    name, needs, by, count = "twice", frozenset({"logprobs"}), "row", 3

    def __init__(self, setup):
        assert setup.trainer is not None and setup.columns == {"twice"}

    async def run(self, claim):
        made = {row.id: {"twice": 2 * row.columns["logprobs"]} for row in claim.rows}
        if FAULT == "raises":
            raise ValueError("out of order")
        if FAULT == "cancelled":
            raise asyncio.CancelledError
        if FAULT == "forgets a row":
            made.popitem()
        if FAULT == "forgets the column":
            made = {row: {"thrice": columns["twice"]} for row, columns in made.items()}
        return made


class Broken(Reward):
    Config = ComponentConfig

    async def __call__(self, trajectory):
        raise ConnectionError("the grader is down")


class Unlucky(LastWord):
    async def play(self, task, chat):
        await super().play(task, chat)
        if chat.random("luck") < 0.3:
            raise RuntimeError("the tool is down")


def relax_algorithms():
    return {"needy": Component("columns_plugin:Needy")}


def relax_stages():
    return {"twice": Component("columns_plugin:Twice", makes=frozenset({"twice"}))} if STAGE else {}


def relax_rewards():
    return {"broken": Component("columns_plugin:Broken")}


def relax_environments():
    return {"unlucky": Component("columns_plugin:Unlucky")}
'''


def plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: bool, fault: str | None = None
) -> Sequence[EntryPoint]:
    installed = installed_plugins()
    folder = tmp_path / "plugins"
    write_plugin(folder, "columns", PLUGIN.replace("STAGE", str(stage)).replace("FAULT", repr(fault)))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "columns_plugin", raising=False)
    return (*installed, *plugins_in(folder))


def test_a_stage_makes_the_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, plugins=["columns"], algorithm={"id": "needy"})
    assert summary(train(path, installed=plugin(tmp_path, monkeypatch, stage=True)))["steps"] == 6


def test_a_column_that_nobody_makes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, plugins=["columns"], algorithm={"id": "needy"})
    with pytest.raises(ConfigError, match="needs the column 'twice', which no stage makes"):
        train(path, installed=plugin(tmp_path, monkeypatch, stage=False))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "failed: ValueError: out of order"),
        ("cancelled", "was cancelled from within"),
        ("forgets a row", r"made no 'twice' for row last-word/\S+; run\(\) must give it"),
        ("forgets the column", "made no 'twice' for row"),
    ],
)
def test_what_goes_wrong_in_a_stage_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    """By one error that names it; it neither hangs nor goes on without the column."""
    path = run_file(tmp_path, plugins=["columns"], algorithm={"id": "needy"}, evaluation=[])
    with pytest.raises(PluginError, match=rf"^stages\.twice: plugin columns .*: stage 'twice' {message}"):
        train(path, installed=plugin(tmp_path, monkeypatch, stage=True, fault=fault))


@pytest.mark.timeout(60)
def test_a_reward_that_always_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, plugins=["columns"], rewards=[{"id": "broken"}], evaluation=[])
    with pytest.raises(
        RelaxError, match=r"nothing of the last 20 groups can be trained.*broken failed.*the grader is down"
    ):
        train(path, installed=plugin(tmp_path, monkeypatch, stage=True))


def test_one_reward_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [{"id": "exact"}, {"id": "broken"}]
    path = run_file(tmp_path, plugins=["columns"], rewards=rewards, evaluation=[])
    directory = train(path, installed=plugin(tmp_path, monkeypatch, stage=True))
    assert [line["rewards/broken/failures"] for line in metrics(directory)] == [16] * 6


def test_plays_that_fail_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path, plugins=["columns"], environments=[{"id": "unlucky"}], evaluation=[])
    installed = plugin(tmp_path, monkeypatch, stage=True)
    directory = train(path, ["max_failed_fraction=0.9"], installed=installed)
    failed = sum(line["plays/errors"] for line in metrics(directory))
    assert summary(directory)["failed_plays"] == failed
    assert 10 < failed < 60 and summary(directory)["groups"]["trained"] == 24


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path) -> None:
    path = run_file(tmp_path, steps=4, evaluation=[])
    train(path)
    with pytest.raises(ConfigError, match=r"steps: found 2, but .* has taken 4"):
        train(path, ["steps=2"])


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs: .* cannot be written"):
        train(run_file(tmp_path, runs=str(tmp_path / "file")))


@pytest.mark.parametrize("field", ["temperature=0.5", "top_p=0.9", "max_new_tokens=1"])
def test_a_hook_cannot_sample_from_another_distribution_than_the_trained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    hook = f"def sampling_request(run, value, event): return dataclasses.replace(value, {field})"
    monkeypatch.setattr(sys.modules[__name__], "PLUGIN", f"{PLUGIN}\n\nimport dataclasses\n{hook}\n")
    installed = plugin(tmp_path, monkeypatch, stage=True)
    path = run_file(tmp_path, plugins=["columns"], evaluation=[], steps=1)
    if field.startswith("max"):
        assert summary(train(path, installed=installed))["mean_length"]["trained"] == 1
    else:
        with pytest.raises(PluginError, match="only max_new_tokens may change"):
            train(path, installed=installed)
