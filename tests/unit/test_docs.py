"""README and docs: what they show is parsed, resolved, run and compared with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from relax_core.cli import app
from relax_core.config import yaml
from relax_core.config.document import page
from relax_core.config.resolve import load, resolve, resolved
from relax_core.config.schema import RunConfig
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import accounted, run_file, summary, train
from relax_envs.single_turn import SingleTurn

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("relax_plugins/*/README.md")),
]
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def section(heading: str) -> str:
    """The text of README below a heading."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, flags=re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


# --- run files ------------------------------------------------------------------------------------------------------


def checked(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The resolved run file. A model's folder, which need not be there, is replaced by one that looks like it."""
    if "path" in raw["model"]:
        (folder / "config.json").write_text("{}")
        raw = raw | {"model": raw["model"] | {"path": str(folder)}}
    return resolved(*resolve(raw))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_resolves(path: Path, tmp_path: Path) -> None:
    raw = yaml.read(path)
    assert checked(raw, tmp_path)["name"] == path.stem == raw["name"]


def run_files() -> list[Any]:
    """Every YAML block, as plain data; write-a-plugin.md and tools.md have tests of their own, which train with theirs.

    A part of a run file in the README of a plugin is meant to be used with that plugin.
    """
    found = []
    for path in PAGES:
        if path.name not in ("write-a-plugin.md", "tools.md"):
            plugins = (
                [path.parent.name.removeprefix("relax-plugin-")] if path.parent.parent.name == "relax_plugins" else []
            )
            for i, text in enumerate(blocks(path.read_text(encoding="utf-8"), "yaml")):
                where = f"{path.relative_to(ROOT)} block {i}"
                found.append(pytest.param({"plugins": plugins} | yaml.load(text, where), id=where))
    return found


@pytest.mark.parametrize("shown", run_files())
def test_a_yaml_block_resolves(shown: dict[str, Any], tmp_path: Path) -> None:
    """A part of a run file is put into a whole one."""
    assert shown.keys() <= RunConfig.model_fields.keys()
    whole = yaml.read(ROOT / "configs" / "text-tiny.yaml")
    if "environments" in shown:
        del whole["evaluation"]
    checked(whole | shown, tmp_path)


def test_the_readme_shows_text_tiny() -> None:
    (shown,) = blocks(section("A run file"), "yaml")
    assert yaml.load(shown, "README") == yaml.read(ROOT / "configs" / "text-tiny.yaml"), (
        "README says that they are equal"
    )


def test_calls_of_check_and_train_resolve() -> None:
    """``relax train configs/FILE PATH=VALUE`` with its overrides, wherever it is shown."""
    calls = re.findall(r"relax (?:train|check) (configs/\S+\.yaml)((?: +[\w.-]+=\S+)*)", README)
    assert len(calls) >= 3
    for path, overrides in calls:
        load(ROOT / path, overrides.split())


# --- settings -------------------------------------------------------------------------------------------------------


def test_config_md_is_up_to_date() -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == page(["omni", "ray", "sglang", "deepeyes", "genrm"]), (
        "write it again: python -m relax_core.config.document omni ray sglang deepeyes genrm > docs/config.md"
    )


def test_config_md_has_every_field_and_component() -> None:
    text = page([])
    for name in RunConfig.model_fields:
        assert f"\n| `{name}` | " in text
    for component in (
        "model: `text`",
        "rewards: `exact`",
        "algorithm: `grpo`",
        "trainer: `torch`",
        "modalities: `audio`",
    ):
        assert f"\n### {component}\n" in text
    assert "| `clip_low` | number > 0, ≤ 1 | `0.2` | The ratio is kept above 1 - clip_low. |" in text
    assert "| `entropy.steps` | int > 0 | required | Steps between the two. |" in text
    assert "| `order` | `started` or `finished` | `started` |" in text
    assert "qwen3-omni" not in text and "\n### model: `qwen3-omni`\n" in page(["omni"])


# --- README ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with README's environment and reward."""
    folder = tmp_path_factory.mktemp("readme")
    (source,) = blocks(section("An environment and a reward"), "python")
    write_plugin(folder / "site", "my", source)
    changes = {
        "plugins": ["my"],
        "steps": 2,
        "model": {
            "id": "text",
            "tiny": {"words": ["say", "no", "cat", "dog", "sun", "moon"], "hidden": 16, "heads": 2},
        },
        "environments": [{"id": "recall"}],
        "rewards": [{"id": "said"}],
        "evaluation": [],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        return train(run_file(folder, **changes), installed=[*installed_plugins(), *plugins_in(folder / "site")])


def test_the_environment_and_the_reward_train(trained: Path) -> None:
    groups = summary(trained)["groups"]
    assert groups["trained"] == 8 and accounted(groups)
    plays = [json.loads(line) for file in trained.glob("trajectories/*.jsonl") for line in file.open()]
    assert max(len(play["turns"]) for play in plays) == 2  # one hint after a wrong answer
    for play in plays:
        replies = [turn["reply"]["parts"][0]["text"] for turn in play["turns"]]
        assert play["rewards"] == {"said": float(play["task"]["answer"] in replies[-1].split())}


def test_a_run_writes_what_the_readme_lists(trained: Path) -> None:
    (tree,) = blocks(section("What a run writes"), "text")
    shown = {name.rstrip("/") for name in re.findall(r"^  (\S+) ", tree, flags=re.MULTILINE)}
    assert shown - {"bad_rows.jsonl"} == {path.name for path in trained.iterdir()}  # there were none
    assert (trained / "checkpoints" / "step-00000002" / "trainer" / "weights.safetensors").is_file()


def test_every_command_has_its_row() -> None:
    rows = re.findall(r"^\| `relax (\S+) ?.*?` \|", section("Commands"), flags=re.MULTILINE)
    assert rows == [
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    ]


def test_rows_of_data_are_tasks(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in blocks(section("Your own data and model"), "json")[0].splitlines()]
    for row in rows:
        for name in [name for kind in ("images", "audios", "videos") for name in row.get(kind, [])]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = SingleTurn.Config.model_validate_json(json.dumps({"data": str(tmp_path / "rows.jsonl")}))
    tasks = list(SingleTurn(settings).tasks("train"))
    assert [task.modality for task in tasks] == ["text", "image", "audio", "audio+video"]
    assert [task.id for task in tasks] == ["1", "2", "siren", "4"]


# --- all pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            found = path.parent / file if file else path
            assert found.exists(), f"{target}: no such file"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, f"{target}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_paths_exist(path: Path) -> None:
    """Of the repository's folders, as code: `tests/unit/`, `relax_core/train.py`."""
    folders = "relax_core|modalities|algorithms|envs|relax_plugins|tests|benchmarks|configs|docs"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name
