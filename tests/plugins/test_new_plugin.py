"""``relax new-plugin``: what it renders is installed, tested, checked and trained; names that cannot be are refused."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from relax_core import cli
from relax_core.config import yaml
from relax_core.new_plugin.kinds import KINDS
from relax_core.testing.commands import import_heavy, run_command
from relax_core.testing.runs import summary

ROOT = Path(__file__).resolve().parents[2]
LINT = ["check", "--isolated", "--quiet", "--line-length", "120", "--select", "E,F,I,UP,B,SIM,RUF"]


def new_plugin(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["new-plugin", *arguments])
    return int(stop.value.code or 0)


def works(folder: Path, *kinds: str) -> None:
    """Rendered under a name with a dash, installed, and every command that it names does what it says."""
    import_heavy()
    project, site = folder / "relax-plugin-zoom-in", folder / "site"
    options = [word for kind in kinds for word in ("--kind", kind)]
    code, said = run_command(["relax", "new-plugin", "zoom-in", *options], folder, site)
    assert code == 0, said
    commands = [line.strip() for line in said.splitlines()[1:]]
    assert commands == [
        "cd relax-plugin-zoom-in",
        "pip install -e .",
        "relax check run.yaml",
        "python -m pytest",
        "relax train run.yaml",
    ]
    for command in [*commands[1:], "relax plugins"]:
        extra = ["steps=2"] if "train" in command else []
        code, said = run_command([*command.split(), *extra], project, site, limit_s=400)
        assert code == 0, f"{command}\n{said}"
    for kind in kinds:
        assert f"zoom-in-{KINDS[kind].id}" in said
    assert summary(project / "runs" / "zoom-in")["groups"]["trained"] == 8
    made = yaml.read(project / "runs" / "zoom-in" / "config.yaml")
    assert made["versions"]["zoom-in"] == "relax-plugin-zoom-in 0.1.0"


@pytest.mark.timeout(600)
def test_all_kinds_together(tmp_path: Path) -> None:
    """But an engine, whose checks take their time."""
    works(tmp_path, *(kind for kind in KINDS if kind != "engine"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(kind: str, tmp_path: Path) -> None:
    works(tmp_path, kind)


@pytest.mark.parametrize("kinds", [list(KINDS), ["callback", "reward"], *([kind] for kind in KINDS)], ids="-".join)
def test_the_files(kinds: list[str], tmp_path: Path) -> None:
    """They are formatted and clean; nothing of the template is left in them."""
    folder = tmp_path / "here"
    options = [word for kind in kinds for word in ("--kind", kind)]
    assert new_plugin("relax-plugin-a_b", *options, "--folder", str(folder)) == 0
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    for kind in KINDS:
        there = {f"relax_plugin_a_b/{kind}.py", f"tests/test_{kind}.py"}
        assert there & files == (there if kind in kinds else set())
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "relax-plugin-a-b"
    assert project["entry-points"]["relax.plugins"] == {"a_b": "relax_plugin_a_b.plugin"}
    for path in folder.rglob("*"):
        if path.is_file():
            assert "$" not in path.read_text() and "template" not in path.read_text(), path
    ruff = [sys.executable, "-m", "ruff"]
    for command in ([*LINT, "."], ["format", "--isolated", "--line-length", "120", "--check", "."]):
        done = subprocess.run([*ruff, *command], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1up", "--kind", "reward"], "NAME: found '1up'; a plugin's name is of lower-case letters"),
        (["Zoom", "--kind", "reward"], "NAME: found 'Zoom'"),
        (["zoom in", "--kind", "reward"], "NAME: found 'zoom in'"),
        (["zoom-", "--kind", "reward"], "NAME: found 'zoom-'"),
        (["žoom", "--kind", "reward"], "NAME: found 'žoom'"),
        (["../up", "--kind", "reward"], "NAME: found '../up'"),
        (["zoom", "--kind", "rewrd"], "--kind: found 'rewrd'; did you mean 'reward'?; allowed are environment, reward"),
        (["zoom"], "--kind: found none; give one or more of environment, reward"),
        (["template", "--kind", "reward"], "NAME: a plugin 'template' is installed already (relax-plugin-template"),
        (["envs", "--kind", "reward"], "NAME: a plugin 'envs' is installed already"),
        (["zoom", "--kind", "reward", "--folder", "full"], "--folder: full is a folder that is not empty"),
        (["zoom", "--kind", "reward", "--folder", "full/file"], "--folder: full/file is a file"),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert new_plugin(*arguments) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1, found
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full"], "nothing was written"


def test_a_package_that_can_be_imported_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "relax_plugin_mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert new_plugin("mine", "--kind", "reward", "--folder", str(tmp_path / "new")) == 2
    assert "NAME: a package relax_plugin_mine can be imported already" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_as_a_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    """Rendered by the installed command, built, installed beside the relax-rl wheel, named in a run file, trained."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT))
    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    # Dependencies come from this environment (a .pth file adds its folder; an editable install there is not followed).
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    run(*pip, *map(str, (tmp_path / "dist").glob("*.whl")))

    relax, project = str(home / "bin" / "relax"), tmp_path / "mine"
    run(relax, "new-plugin", "mine", "--kind", "environment", "--kind", "reward", "--folder", str(project))
    run(*pip, "--no-build-isolation", str(project))
    assert "relax-plugin-mine 0.1.0" in run(relax, "plugins")
    run(relax, "train", str(project / "run.yaml"), "steps=2", f"runs={tmp_path}")
    assert summary(tmp_path / "mine")["groups"]["trained"] == 8


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
