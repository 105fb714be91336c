"""docs/engines.md: the engine that it shows passes the checks, is probed, and trains."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from relax_core.new_plugin.render import chosen_kinds, names_of, render
from relax_core.plugins import installed_plugins
from relax_core.probe import BFLOAT16, BLANK, FLOAT16, FLOAT32
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import metrics, run_file, train

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```python\n(# (\S+)\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
FILES = {name: text for text, name in BLOCKS}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    installed_plugins()
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [m for m in sys.modules if m.startswith(("relax_plugin_plain", "plain_plugin"))]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.timeout(110)
def test_the_engine_of_the_page_passes_the_checks(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {f"relax_plugin_plain/{name}.py" for name in ("engine", "engine_config", "plugin")}
    assert set(FILES) == modules | {"tests/test_plain.py"}
    monkeypatch.syspath_prepend(project / "tests")
    monkeypatch.delitem(sys.modules, "test_plain", raising=False)
    importlib.import_module("test_plain").test_plain()


@pytest.mark.timeout(60)
def test_a_run_with_it_is_probed_and_trains(project: Path) -> None:
    write_plugin(project, "plain", "from relax_plugin_plain.plugin import relax_engines  # noqa\n")
    path = run_file(project, plugins=["plain"], engine={"id": "plain-plain"}, steps=2, evaluation=[])
    directory = train(path, installed=[*installed_plugins(), *plugins_in(project)])
    assert [line["step"] for line in metrics(directory)] == [1, 2]


@pytest.mark.parametrize("name", ["engine", "engine_config"])
def test_the_page_shows_what_new_plugin_renders(name: str) -> None:
    path = f"relax_plugin_plain/{name}.py"
    rendered = render(names_of("plain"), chosen_kinds(["engine"]))
    assert FILES[path] == f"# {path}\n{rendered[path]}"


def test_the_page_names_the_tolerances() -> None:
    for t in (FLOAT32, FLOAT16, BFLOAT16):
        assert re.search(rf"^\| {t.dtype}[^|]* \| {t.mean:g} \| {t.largest:g} \|", PAGE, flags=re.MULTILINE), t
    assert f"to {BLANK:g}" in PAGE
