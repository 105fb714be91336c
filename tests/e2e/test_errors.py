"""What a user gets wrong is answered by one line that says where, what, and what to do; nothing starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from relax_core.cli import main
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import TEXT_RUN, run_file, summary, train

PICTURE_MODEL = {"id": "qwen3-omni", "tiny": {"words": ["what", "colour", "?", "red"], "hidden": 32}}


def refused(capsys: pytest.CaptureFixture[str], path: Path, *overrides: str) -> str:
    """The one line of ``relax train``; no run directory came to be."""
    with pytest.raises(SystemExit) as stop:
        main(["train", str(path), *overrides])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ") and "\n" not in said, said
    assert not (path.parent / "runs").exists()
    return said


def pictures(folder: Path, bad: int, good: int) -> dict[str, Any]:
    """A data set with some unreadable pictures; the changes of a run file that reads it."""
    rows = []
    for i in range(good + bad):
        file = folder / f"{i}.png"
        Image.new("RGB", (32, 32), (200 + i % 50, 0, 0)).save(file)
        if i < bad:
            file.write_bytes(file.read_bytes()[:40])
        messages = [{"role": "user", "content": "what colour ? <image>"}]
        rows.append(json.dumps({"messages": messages, "images": [file.name], "answer": "red"}))
    (folder / "data.jsonl").write_text("\n".join(rows))
    return {
        "plugins": ["omni"],
        "model": PICTURE_MODEL,
        "environments": [{"id": "single_turn", "name": "pictures", "data": str(folder / "data.jsonl")}],
        "evaluation": [],
        "steps": 2,
    }


def test_unknown_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, run_file(tmp_path), "algorithm.id=grop")
    assert "algorithm" in said and "'grop'" in said and "did you mean 'grpo'?" in said


def test_unknown_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, run_file(tmp_path, trainer={"warmup": 3}))
    assert "trainer.warmup" in said and "did you mean" in said


def test_unknown_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, run_file(tmp_path, plugins=["omi"]))
    assert "'omi'" in said and "did you mean 'omni'?" in said


def test_missing_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused(capsys, tmp_path / "nowhere.yaml")


def test_missing_data_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environments = [{"id": "single_turn", "data": str(tmp_path / "none.jsonl")}]
    said = refused(capsys, run_file(tmp_path, environments=environments, evaluation=[]))
    assert "environments" in said and "none.jsonl" in said


def test_empty_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    environments = [{"id": "single_turn", "data": str(tmp_path / "empty.jsonl")}]
    said = refused(capsys, run_file(tmp_path, environments=environments, evaluation=[]))
    assert "empty.jsonl" in said and "no" in said


def test_unreadable_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, run_file(tmp_path, **pictures(tmp_path, bad=3, good=1)))
    assert ".png" in said and "data.jsonl" in said


def test_a_bad_row_is_counted_and_left_out(tmp_path: Path) -> None:
    directory = train(run_file(tmp_path, **(pictures(tmp_path, bad=1, good=15) | {"steps": 4})))  # one epoch
    found = summary(directory)
    assert found["bad_rows"] == {"pictures": 1} and found["groups"]["failed"] == 0
    assert found["groups"]["trained"] == 16


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def on_step_ends(run, event): ...", ["on_step_ends", "did you mean 'on_step_end'?"]),
        ("def on_step_end(run, events): ...", ["on_step_end", "events"]),
        (
            "from relax_core.interfaces import Component\n"
            "def relax_rewards(): return {'exact': Component('relax_envs.rewards.exact:Exact')}",
            ["'exact'", "relax-rl", "dist-broken 1.0"],
        ),
        ("relax_api = 99", ["99", "dist-broken 1.0"]),
        ("import not_there", ["not_there", "dist-broken 1.0"]),
        (
            "from relax_core.interfaces import Component\n"
            "from relax_core.hookspecs import Callback\n"
            "class Watch(Callback):\n    def on_step_ended(self, run, event): ...\n"
            "def relax_callbacks(): return {'watch': Component('broken_plugin:Watch')}",
            ["on_step_ended", "did you mean 'on_step_end'?"],
        ),
    ],
)
def test_a_plugin_that_is_wrong(tmp_path: Path, source: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_plugin(tmp_path / "plugins", "broken", source)
    installed = (*installed_plugins(), *plugins_in(tmp_path / "plugins"))
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    callbacks = [{"id": "watch"}] if "Watch" in source else []
    path = run_file(tmp_path, plugins=["broken"], callbacks=callbacks)
    with pytest.raises(Exception) as error:
        train(path, installed=installed)
    said = str(error.value)
    assert type(error.value).__name__ in {"PluginError", "ConfigError"} and "\n" not in said
    assert all(word in said for word in words), said
    sys.modules.pop("broken_plugin", None)


def test_the_sound_run_file_is_accepted(tmp_path: Path) -> None:
    """So that every refusal above is for the reason it names."""
    assert summary(train(run_file(tmp_path, steps=1, evaluation=[])))["steps"] == 1
    assert TEXT_RUN["steps"] == 6
