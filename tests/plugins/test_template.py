"""The plugin template: used from a run file, and as a wheel in a clean environment; the core stays as it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from relax_core.config import yaml
from relax_core.config.resolve import load
from relax_core.testing.modality import check_modality
from relax_core.testing.runs import run_file, summary, train
from relax_plugin_template.modality import PortablePixmap

ROOT = Path(__file__).resolve().parents[2]

TEMPLATE_RUN = {
    "steps": 4,
    "plugins": ["template"],
    "model": {"id": "text", "tiny": {"words": ["word", "?", "cat", "dog", "sun", "tree"], "hidden": 32, "layers": 1}},
    "environments": [{"id": "template-echo"}],
    "rewards": [{"id": "template-near"}],
    "algorithm": {"id": "template-reinforce"},
    "modalities": [{"id": "template-ppm"}],
    "callbacks": [{"id": "template-best"}],
    "evaluation": [{"name": "held-out", "environment": "template-echo"}],
}


def test_a_run_file_uses_all_that_it_offers(tmp_path: Path) -> None:
    directory = train(run_file(tmp_path, **TEMPLATE_RUN))
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_copy_as_a_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    """Copied under another name, built, installed beside the relax-rl wheel, listed, named in a run file, trained."""
    plugin = tmp_path / "relax-plugin-mine"
    shutil.copytree(
        ROOT / "relax_plugins" / "relax-plugin-template", plugin, ignore=shutil.ignore_patterns("__pycache__")
    )
    for file in [plugin / "pyproject.toml", *plugin.glob("relax_plugin_template/*.py")]:
        text = file.read_text().replace("relax_plugin_template", "relax_plugin_mine")
        text = text.replace("relax-plugin-template", "relax-plugin-mine").replace('template = "', 'mine = "')
        file.write_text(text.replace('"template-', '"mine-'))
    (plugin / "relax_plugin_template").rename(plugin / "relax_plugin_mine")
    for source in (ROOT, plugin):
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source))

    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    wheels = sorted(str(path) for path in (tmp_path / "dist").glob("*.whl"))
    assert len(wheels) == 2
    # Dependencies come from this environment (a .pth file adds its folder; an editable install there is not followed).
    run(str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels)
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    relax = str(home / "bin" / "relax")
    listed = run(relax, "plugins")
    assert "mine-echo" in listed and "relax-plugin-mine 0.1.0" in listed
    renamed = json.loads(json.dumps(TEMPLATE_RUN).replace("template", "mine"))
    path = run_file(tmp_path / "work", **renamed)
    run(relax, "check", str(path))
    run(relax, "train", str(path))
    assert summary(tmp_path / "work" / "runs" / "tiny")["groups"]["trained"] == 16
    made = yaml.read(tmp_path / "work" / "runs" / "tiny" / "config.yaml")
    assert made["versions"]["mine"] == "relax-plugin-mine 0.1.0"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_decoder_keeps_the_promises_of_a_modality(tmp_path: Path) -> None:
    path = tmp_path / "picture.ppm"
    path.write_bytes(b"P6\n3 2\n255\n" + bytes(range(18)))
    (tmp_path / "scratch").mkdir()
    check_modality(PortablePixmap(PortablePixmap.Config()), [path], tmp_path / "scratch")
