"""``relax play``: scripts, typed lines and the policy, through the command line; what goes wrong is data."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_core import cli
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import write_plugin
from relax_core.testing.runs import run_file, train

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''
import asyncio

from relax_core.interfaces import Component, Environment
from relax_core.types import Task, user
from relax_envs.tools.environment import ToolEnvironment
from relax_envs.tools.tool import tool


class Base(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{word}", (user("last of cat dog ?"),), word) for word in ("dog", "cat")]


class Raises(Base):
    async def play(self, task, chat):
        await chat(*task.messages)
        raise RuntimeError("the door is locked")


class Hangs(Base):
    async def play(self, task, chat):
        await chat(*task.messages)
        await asyncio.Event().wait()


class Garbage(Base):
    async def play(self, task, chat):
        await chat(42)


class Returns(Base):
    async def play(self, task, chat):
        return (await chat(*task.messages)).text


class Again(Base):
    async def play(self, task, chat):
        other = chat.branch(0)
        await chat(*task.messages)
        await other("dog ?")
        chat.metrics["asked"] = 2
        chat.answer = "cat"


@tool
def look(place: str) -> str:
    """What is there."""
    return {"left": "cat", "right": "dog"}[place]


class Looks(ToolEnvironment):
    def tasks(self, split):
        return Base.tasks(self, split)

    def tools(self, task, chat):
        return [look]


def relax_environments():
    names = {"raises": "Raises", "hangs": "Hangs", "garbage": "Garbage", "returns": "Returns", "again": "Again",
             "looks": "Looks"}
    return {f"odd-{id}": Component(f"odd_plugin:{name}") for id, name in names.items()}
'''
CALL = ('{"name":', '"look",', '"arguments":', '{"place":', '"left"}}', "<tool_call>", "</tool_call>")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """A run file with an environment of the plugin above."""
    write_plugin(tmp_path / "site", "odd", SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "odd_plugin", raising=False)
    installed_plugins.cache_clear()

    def write(id: str, **limits: Any) -> Path:
        words = ["last", "of", "?", "cat", "dog", *CALL]
        model = {"id": "text", "tiny": {"words": words, "unknown_words": "keep", "hidden": 16, "heads": 2}}
        section = {"id": f"odd-{id}", "limits": limits, **({"announce": "none"} if id == "looks" else {})}
        return run_file(
            tmp_path,
            plugins=["odd"],
            model=model,
            environments=[section],
            evaluation=[],
            sampling={"max_new_tokens": 20},
        )

    yield write
    installed_plugins.cache_clear()


def play(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["play", *map(str, arguments)])
    return int(stop.value.code or 0)


def saved(path: Path, number: int = 1, step: int = 0) -> list[dict[str, Any]]:
    """The trajectories of the run file's play of that number."""
    file = path.parent / "runs" / "tiny-plays" / str(number) / f"step-{step:08d}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def replies(trajectory: dict[str, Any]) -> list[str]:
    return [turn["reply"]["parts"][0]["text"] for turn in trajectory["turns"]]


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_a_scripted_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path)
    assert play(path, "--task", 3, "--split", "eval", "--reply", "cat dog") == 0
    said = capsys.readouterr().out
    (trajectory,) = saved(path)
    assert replies(trajectory) == ["cat dog"] and trajectory["rewards"]["exact"] == 0.0
    assert trajectory["task"]["id"] in said
    assert "assistant (3 tokens, eos)\n  cat dog\n" in said
    assert "1 turn; 3 tokens sampled" in said and "in 1 sample (0 rewrites)" in said
    assert "reward 0.000: exact 0.000  format 0.000" in said
    (sample,) = trajectory["samples"]
    assert sum(sample["mask"]) == 3 and set(sample["versions"]) == {-1, 0}
    assert "saved: " in said


def test_replies_of_a_file_over_several_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    echo = {
        "plugins": ["template"],
        "model": {"id": "text", "tiny": {"words": ["word", "?", "cat", "dog"], "hidden": 16, "heads": 2}},
        "environments": [{"id": "template-echo", "words": ["cat", "dog"], "hints": 2}],
        "rewards": [{"id": "template-near"}],
        "evaluation": [],
    }
    path, script = run_file(tmp_path, **echo), tmp_path / "script.txt"
    script.write_text('dog\n"dog\\ndog"\ncat\n', encoding="utf-8")
    assert play(path, "--task", "cat", "--replies", script, "--plays", 2) == 0
    first, second = saved(path)
    assert replies(first) == replies(second) == ["dog", "dog dog", "cat"], "each play begins the script anew"
    assert [t["member"] for t in (first, second)] == [0, 1] and first["reward"] == 1.0
    assert play(path, "--task", "cat", "--reply", "dog") == 0
    assert "all 1 replies are said, and the environment asks for another one" in capsys.readouterr().out
    (cut,) = saved(path, 2)
    assert cut["stop"] == "abort" and replies(cut) == ["dog"]


def test_a_picture_is_a_file_to_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    from PIL import Image

    folder = tmp_path / "out"
    assert (
        play(ROOT / "configs" / "omni-tiny.yaml", "--environment", "image", "--reply", "red", "--folder", folder) == 0
    )
    said = capsys.readouterr().out
    found = re.search(r"\[image (\d+)x(\d+), saved as (.*?)\]", said)
    assert found, said
    with Image.open(found[3]) as picture:
        assert picture.size == (int(found[1]), int(found[2]))
    assert Path(found[3]).parent == folder / "media" and (folder / "step-00000000.jsonl").is_file()


def test_branches_and_metrics_are_shown(odd: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = odd("again")
    assert play(path, "--reply", "dog", "--reply", "cat") == 0
    said = capsys.readouterr().out
    assert "another conversation, behind reply 0" in said and "metrics: asked 2" in said and "in 2 samples" in said


# --- a person ---------------------------------------------------------------------------------------------------------


def test_typed_replies(
    odd: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = 'blue\n{"name": "look", "arguments": {"place": "left"}}\ncat\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    path = odd("looks")
    assert play(path) == 0
    said = capsys.readouterr().out
    assert "the model has no word for 'blue'" in said
    assert '[calls look({"place": "left"})]' in said
    (trajectory,) = saved(path)
    (result,) = trajectory["turns"][1]["prompt"][0]["parts"]
    assert result["parts"] == [{"type": "text", "text": "cat"}]
    assert replies(trajectory)[1] == "cat" and trajectory["stop"] == "eos"


def test_the_end_of_input_ends_the_play(odd: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From a pipe that gives two lines at once."""
    read, write = os.pipe()
    os.write(write, b"<tool_call>\ncat")
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        path = odd("looks")
        assert play(path) == 0
    (trajectory,) = saved(path)
    assert trajectory["stop"] == "eos" and replies(trajectory) == ["<tool_call>", "cat"], "a broken call is answered"


def test_an_interrupted_play_is_saved(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    command = [sys.executable, "-u", "-m", "relax_core.cli", "play", str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=tmp_path)
    try:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        said, end = b"", time.monotonic() + 60
        while b"reply> " not in said and time.monotonic() < end:
            said += child.stdout.read() or b""
            time.sleep(0.02)
        assert b"reply> " in said
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
    finally:
        child.kill()
        child.communicate()
    (trajectory,) = saved(path)
    assert trajectory["stop"] == "abort" and trajectory["turns"] == [] and trajectory["reward"] is None


# --- the policy -------------------------------------------------------------------------------------------------------


def test_the_policy_of_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path, evaluation=[])
    assert play(path, "--policy", "model", "steps=2") == 0
    assert "no checkpoint is there" in capsys.readouterr().out
    directory = train(path, ["steps=2"])
    before = {p: p.stat().st_mtime_ns for p in directory.rglob("*")}
    assert play(path, "--policy", "model", "steps=2", "--plays", 2) == 0
    assert "the policy of step 2" in capsys.readouterr().out
    first, second = saved(path, 2, step=2)
    assert set(first["samples"][0]["versions"]) == {-1, 2}
    assert first["samples"][0]["logprobs"] != second["samples"][0]["logprobs"], "each play draws for itself"
    assert {p: p.stat().st_mtime_ns for p in directory.rglob("*")} == before


# --- what goes wrong --------------------------------------------------------------------------------------------------

FAILS = {
    "raises": "error: environments.odd-raises: RuntimeError: the door is locked",
    "hangs": "error: environments.odd-hangs: Timeout: tools and environment took longer than limits.seconds (0.3)",
    "returns": "error: environments.odd-returns: TypeError: play returned a str",
    "garbage": "error: environments.odd-garbage: AttributeError",
}


@pytest.mark.parametrize("id", FAILS)
def test_a_play_that_fails_is_data(id: str, odd: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = odd(id, seconds=0.3)
    assert play(path, "--reply", "dog", "--plays", 2) == 3
    assert capsys.readouterr().out.count(FAILS[id]) == 2
    for trajectory in saved(path):
        assert trajectory["error"]["where"] == f"environments.odd-{id}" and trajectory["reward"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "modl"], "--policy: found 'modl'; did you mean 'model'?; allowed are scripted, human, model"),
        (["--policy", "scripted"], "there are no replies: give --reply TEXT, or --replies FILE"),
        (["--policy", "human", "--reply", "cat"], "--policy human, which has its own"),
        (["--split", "test", "--reply", "cat"], "--split: found 'test'; allowed are train, eval"),
        (["--task", "9999999", "--reply", "cat"], "tasks, counted from 0"),
        (["--task", "nobody", "--reply", "cat"], "--task: no task has the id 'nobody'"),
        (["--environment", "lastword", "--reply", "cat"], "did you mean 'last-word'?"),
        (["--reply", "blue"], "the model has no word for 'blue': use words of its vocabulary"),
        (["--replies", "/nowhere"], "--replies: /nowhere cannot be read"),
        (["--folder", ".", "--reply", "cat"], "--folder: . is there already, and not empty"),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert play(path, *arguments) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1, found
