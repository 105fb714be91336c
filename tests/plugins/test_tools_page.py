"""docs/tools.md: its tools are called, its environments played, its run files resolved; the drawers are learned."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.config import yaml
from relax_core.config.resolve import resolve
from relax_core.interfaces import Environment
from relax_core.plugins import installed_plugins
from relax_core.run import Run, build_environments
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import metrics, summary, train
from relax_core.testing.scripted_plays import play
from relax_core.types import Image, Trajectory
from relax_envs.sandbox import runner

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
FILES = {text.split("\n", 1)[0].removeprefix("# "): text for language, text in BLOCKS if language == "python"}
DRAWERS, TOOL_USE, GYMNASIUM = (yaml.load(text, "tools.md") for language, text in BLOCKS if language == "yaml")

SEARCH = '''
def search(query: str) -> str:
    """Searches."""
    return f"nothing about {query}"
'''
CONVERT = '''
def convert(metres: float) -> dict[str, float]:
    """Metres in feet."""
    return {"feet": round(metres / 0.3048, 1)}
'''
WORLDS = """
class Maze:
    def __init__(self, size):
        self.size = size

    def reset(self, *, seed=None, options=None):
        return "a wall", {}

    def step(self, action):
        return "a wall", float(action == [1, 0]), True, False, {}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files and those that its run files name; it is the working directory."""
    own = {"my_tools.py": CONVERT, "my_package/search.py": SEARCH, "my_package/worlds.py": WORLDS}
    for name, text in (FILES | own).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("problems.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "what is 6 times 7 ?", "answer": "42"}))
    write_plugin(tmp_path / "plugins", "drawers", FILES["drawers_plugin.py"])
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "plugins"):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("drawers_plugin", "my_package", "my_package.search", "my_package.worlds"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


INSTALLED = installed_plugins()


def environments(site: Path, shown: dict[str, Any]) -> dict[str, Environment]:
    """Those of a block; a part of a run file is put into a whole one."""
    whole = yaml.read(ROOT / "configs" / "text-tiny.yaml")
    del whole["evaluation"]
    config, stack = resolve(whole | shown, installed=(*INSTALLED, *plugins_in(site / "plugins")))
    return build_environments(Run(config, site / "runs", stack))


def played(environment: Environment, *replies: str) -> Trajectory:
    found = play(environment, environment.tasks("train")[0], replies)
    assert found.error is None, found.error
    return found


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(trajectory: Trajectory, turn: int = 1) -> list[str]:
    return [part.parts[0].text for part in trajectory.turns[turn].prompt[0].parts]  # type: ignore[union-attr]


def test_the_tools_do_what_is_said(site: Path) -> None:
    crop, counter = module(site / "a_tool.py").crop, module(site / "a_class.py").Counter()
    said, picture = asyncio.run(crop(crop.read({"left": 3, "right": 8})))
    assert said == "Here it is:" and isinstance(picture, Image) and picture.source.data.shape == (64, 5, 3)  # type: ignore[union-attr]
    for arguments in ({"left": 5, "right": 5}, {"left": 0, "right": 99}):
        with pytest.raises(Exception, match="outside of the picture"):
            asyncio.run(crop(crop.read(arguments)))
    assert [asyncio.run(counter(counter.read({"by": n}))) for n in (2, 3)] == ["2", "5"]
    for tool, arguments, said in ((crop, {"left": -1, "right": 1}, "left"), (counter, {"by": 0}, "at least 1")):
        with pytest.raises(Exception, match=said):
            tool.read(arguments)


def test_the_drawers_are_played(site: Path) -> None:
    drawers = environments(site, DRAWERS)["drawers"]
    task = drawers.tasks("train")[0]
    asked = task.metadata["drawers"].index(task.answer) + 1
    found = played(drawers, call("look", at=asked) + call("look", at=4), task.answer)
    assert results(found) == [task.answer, "There is no drawer 4."] and found.metrics["looked"] == 1


def test_rows_are_played_with_python_and_functions(site: Path) -> None:
    if runner.NEEDED - runner.guarantees():
        pytest.skip("this system cannot guard programs")
    env = environments(site, TOOL_USE)["tool_use"]
    calls = call("python", code="print(6 * 7)") + call("search", query="42") + call("units", metres=1)
    assert results(played(env, calls, "42")) == ["42", "nothing about 42", '{"feet": 3.3}']


def test_gymnasium_is_played(site: Path) -> None:
    pytest.importorskip("gymnasium")
    lake, own = environments(site, GYMNASIUM).values()
    found = played(lake, *["I try <go>left</go>, no, <go>down</go>"] * 100)  # the ice is slippery: it ends in a hole
    assert found.metrics["steps"] == len(found.turns) < 100 and found.metrics["invalid_actions"] == 0
    assert "FHFH" in found.turns[0].prompt[0].text
    assert played(own, "right").metrics["return"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_drawers_are_learned(site: Path) -> None:
    """From guessing, a quarter right, to all right, as the page says: what the tool said is what is answered."""
    (site / "run.yaml").write_text(json.dumps(DRAWERS | {"runs": str(site / "runs")}))
    directory = train(site / "run.yaml", installed=(*INSTALLED, *plugins_in(site / "plugins")))
    lines = [line for line in metrics(directory) if line["kind"] == "train"]
    found = summary(directory)
    assert lines[0]["environments/drawers/exact"] < 0.3 and lines[-1]["environments/drawers/exact"] > 0.9
    assert found["evaluation"]["held-out"]["accuracy"] > 0.9
    assert lines[-1]["environments/drawers/play/looked"] > 0.9
    assert found["cpu_seconds"] <= 100
