"""A run in which some plays raise, hang, return garbage or flood goes on without them; too many end it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from relax_core.errors import RelaxError
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import accounted, metrics, run_file, summary, train

MISBEHAVING = """
import asyncio
from relax_core.interfaces import Component, ComponentConfig
from relax_envs.toy.words import LastWord


class Misbehaving(LastWord):
    class Config(LastWord.Config):
        share: float = 0.2

    async def play(self, task, chat):
        await super().play(task, chat)
        draw = chat.random("fate") / self.config.share
        if draw < 0.25:
            raise ValueError("the map is gone")
        if draw < 0.5:
            await asyncio.sleep(3600)
        if draw < 0.75:
            return {"reward": 1}
        if draw < 1:
            await chat("cat " * 5000)


def relax_environments():
    return {"misbehaving": Component("misbehaving_plugin:Misbehaving")}
"""
Run = tuple[Path, Sequence[EntryPoint]]
KINDS = {"ValueError", "Timeout", "TypeError", "TooManyTokens"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    installed = installed_plugins()  # before the folder is on the path, where it would be found as well
    write_plugin(tmp_path / "plugins", "misbehaving", MISBEHAVING)
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    sys.modules.pop("misbehaving_plugin", None)
    environment = {"id": "misbehaving", "limits": {"seconds": 0.2, "tokens": 1000}}
    path = run_file(tmp_path, plugins=["misbehaving"], environments=[environment], evaluation=[], steps=12)
    return path, (*installed, *plugins_in(tmp_path / "plugins"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("staleness", [0, 2])
def test_their_groups_go_on_and_each_kind_is_counted(run: Run, staleness: int) -> None:
    path, installed = run
    directory = train(path, [f"max_staleness={staleness}", "environments.0.share=0.25"], installed=installed)
    lines = [line for line in metrics(directory) if line["kind"] == "train"]
    failed = {kind: sum(line.get(f"plays/errors/{kind}", 0) for line in lines) for kind in KINDS}
    assert min(failed.values()) >= 1, failed
    assert sum(failed.values()) == sum(line["plays/errors"] for line in lines) >= 12
    assert all(0 <= line["plays/failed_fraction"] < 1 for line in lines)
    assert any(line["plays/stops/time"] for line in lines if "plays/stops/time" in line)
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] >= 12 * 4 - found["groups"]["failed"]
    assert found["failed_plays"] >= 12 and all(line["train/updates"] == 1 for line in lines)


@pytest.mark.timeout(120)
def test_too_many_end_the_run_by_one_line(run: Run) -> None:
    path, installed = run
    with pytest.raises(
        RelaxError, match=r"max_failed_fraction: \d+ of the last 80 plays failed, 0\.3 of them may"
    ) as end:
        train(path, ["max_failed_fraction=0.3", "environments.0.share=0.9"], installed=installed)
    assert "\n" not in str(end.value) and "environments.misbehaving: " in str(end.value)
