"""The plugin template is what ``relax new-plugin`` renders, with every kind; after a change there, write it again::

.venv/bin/python tests/plugins/test_template.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from relax_core.config.resolve import load
from relax_core.new_plugin.kinds import KINDS
from relax_core.new_plugin.render import chosen_kinds, names_of, render
from relax_core.testing.runs import run_file, summary, train

FOLDER = Path(__file__).resolve().parents[2] / "relax_plugins" / "relax-plugin-template"
OURS = {"LICENSE"}
"""What a rendered plugin does not have: its author chooses a license."""


def rendered() -> dict[str, str]:
    return render(names_of("template"), chosen_kinds(list(KINDS)))


def test_it_is_what_new_plugin_renders() -> None:
    files = {p for p in FOLDER.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    found = {p.relative_to(FOLDER).as_posix(): p.read_text(encoding="utf-8") for p in files}
    assert {name: text for name, text in found.items() if name not in OURS} == rendered(), __doc__
    assert set(found) >= OURS


def test_a_run_file_uses_all_that_it_offers(tmp_path: Path) -> None:
    """Its own, but for the engine, which is as slow as it is short."""
    directory = train(FOLDER / "run.yaml", ["steps=4", f"runs={tmp_path}", "engine.id=torch"])
    assert summary(directory)["groups"]["trained"] == 16
    state = json.loads((directory / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["callbacks"]["callbacks.0"]["step"] in {0, 1, 2, 3}
    lines = [json.loads(line) for file in directory.glob("trajectories/*.jsonl") for line in file.open()]
    assert max(len(line["turns"]) for line in lines) == 2  # one hint after a wrong answer


def test_only_the_plugins_line_differs(tmp_path: Path) -> None:
    with_it = load(run_file(tmp_path / "a", plugins=["template"]))[1]
    without = load(run_file(tmp_path / "b", plugins=[]))[1]
    assert set(with_it.components("rewards")) - set(without.components("rewards")) == {"template-near"}
    assert set(with_it.versions) - set(without.versions) == {"template"}


def write() -> None:
    for path in FOLDER.iterdir():
        if path.name not in OURS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in rendered().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
