"""The distributions: what the wheels hold, what the tool settings list, and how light the core is to import."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("relax_plugins/*/pyproject.toml"))
SUITES = {"relax_modalities", "relax_algorithms", "relax_envs"}
HEAVY = ("torch", "transformers", "transformers.modeling_utils", "numpy", "ray", "megatron", "sglang")


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def plugin_packages() -> set[str]:
    return {plugin.name.replace("-", "_") for plugin in PLUGINS}


def python(*arguments: str) -> str:
    """Run this interpreter in a process of its own and return what it printed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- settings that list every plugin -------------------------------------------------------------------------------


def test_every_plugin_folder_is_a_distribution() -> None:
    assert sorted(ROOT.glob("relax_plugins/relax-plugin-*")) == PLUGINS
    for plugin in PLUGINS:
        assert (plugin / plugin.name.replace("-", "_") / "__init__.py").is_file(), plugin


def test_mypy_path_lists_every_plugin() -> None:
    prefix = "$MYPY_CONFIG_FILE_DIR/relax_plugins/"
    listed = [path for path in settings()["tool"]["mypy"]["mypy_path"] if path.startswith(prefix)]
    assert sorted(listed) == [prefix + plugin.name for plugin in PLUGINS]


def test_import_linter_lists_every_plugin() -> None:
    linter = settings()["tool"]["importlinter"]
    assert set(linter["root_packages"]) == {"relax_core"} | SUITES | plugin_packages()

    layers = next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    assert [{name.strip() for name in layer.split("|")} for layer in layers] == [
        plugin_packages(),
        SUITES,
        {"relax_core"},
    ]


# --- wheels ----------------------------------------------------------------------------------------------------------


def build_wheel(source: Path, target: Path) -> zipfile.ZipFile:
    """Build without isolation, so that no network is needed."""
    python("-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source))
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


def entry_points(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    return {section: dict(parser[section]) for section in parser.sections()}


def top_folders(wheel: zipfile.ZipFile) -> set[str]:
    return {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}


def holds_module(wheel: zipfile.ZipFile, module: str) -> bool:
    path = module.replace(".", "/")
    return not {f"{path}.py", f"{path}/__init__.py"}.isdisjoint(wheel.namelist())


@pytest.fixture(scope="module")
def relax_wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with build_wheel(ROOT, tmp_path_factory.mktemp("dist")) as wheel:
        yield wheel


def test_wheel_holds_the_core_and_the_suites_and_nothing_else(relax_wheel: zipfile.ZipFile) -> None:
    assert top_folders(relax_wheel) == {"relax_core"} | SUITES
    assert not [name for name in relax_wheel.namelist() if "/tests/" in name or name.split("/")[-1].startswith("test_")]
    for package in top_folders(relax_wheel):
        assert f"{package}/py.typed" in relax_wheel.namelist()


def test_wheel_holds_every_file_of_the_packages(relax_wheel: zipfile.ZipFile) -> None:
    """An ignored folder is left out without a word: compare with the disk."""
    on_disk = {
        str(path.relative_to(parent))
        for parent, package in [
            (ROOT, "relax_core"),
            (ROOT / "modalities", "relax_modalities"),
            (ROOT / "algorithms", "relax_algorithms"),
            (ROOT / "envs", "relax_envs"),
        ]
        for path in (parent / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }
    assert on_disk <= set(relax_wheel.namelist())


def test_wheel_carries_the_license(relax_wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in relax_wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert relax_wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_wheel_declares_the_command_and_the_plugins(relax_wheel: zipfile.ZipFile) -> None:
    points = entry_points(relax_wheel)
    assert points["console_scripts"] == {"relax": "relax_core.cli:main"}
    assert points["relax.plugins"] == {
        "core": "relax_core.builtin",
        "modalities": "relax_modalities.plugin",
        "algorithms": "relax_algorithms.plugin",
        "envs": "relax_envs.plugin",
    }
    for module in [*points["relax.plugins"].values(), "relax_core.cli"]:
        assert holds_module(relax_wheel, module), module


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_plugin_wheel(plugin: Path, tmp_path: Path) -> None:
    package = plugin.name.replace("-", "_")
    with build_wheel(plugin, tmp_path) as wheel:
        assert top_folders(wheel) == {package}
        assert f"{package}/py.typed" in wheel.namelist()
        assert [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        modules = entry_points(wheel)["relax.plugins"].values()
        assert modules
        for module in modules:
            assert holds_module(wheel, module), module


# --- a light core ----------------------------------------------------------------------------------------------------


def loaded_after(code: str) -> list[str]:
    """The heavy packages in ``sys.modules`` of a new process after it ran ``code``."""
    report = f"import sys\n{code}\nprint('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    return python("-c", report).splitlines()[-1].split()[1:]


def seconds(code: str) -> float:
    """The best of three wall times of a new process that runs ``code``."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        python("-c", code)
        best = min(best, time.perf_counter() - start)
    return best


def test_importing_the_core_is_quick() -> None:
    """The aim is 0.3 s; the bound leaves room for a busy machine."""
    assert seconds("import relax_core") - seconds("pass") < 1.0


def test_importing_the_core_loads_nothing_heavy() -> None:
    assert loaded_after("import relax_core") == []


def test_help_loads_nothing_heavy() -> None:
    call = "sys.argv = ['relax', '--help']\ntry: main()\nexcept SystemExit as stop: assert not stop.code"
    assert loaded_after(f"from relax_core.cli import main\n{call}") == []


def core_modules() -> list[Path]:
    """The core's files outside relax_core/torch and relax_core/models, the places for torch and transformers."""
    core = ROOT / "relax_core"
    light = [core / "torch" / "config.py", core / "models" / "config.py"]
    heavy = {"torch", "models"}
    return light + [path for path in sorted(core.rglob("*.py")) if path.relative_to(core).parts[0] not in heavy]


def imports_when_loaded(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Top-level package and line of each import that runs with the module: not in a function, not for type checkers."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield node.module.split(".")[0], node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports_when_loaded(node.orelse)
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from imports_when_loaded(getattr(node, field, []))
            for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                yield from imports_when_loaded(part.body)


def test_the_scan_sees_what_runs_on_import() -> None:
    source = """
import a.b, c
from d.e import f
from . import g
if TYPE_CHECKING:
    import h
else:
    import i
try:
    import j
except ImportError:
    import k
finally:
    import l
class C:
    import m
    def method(self):
        import n
async def function():
    import o
match 1:
    case _:
        with open("x"):
            import p
"""
    assert {name for name, _ in imports_when_loaded(ast.parse(source).body)} == set("acdijklmp")


def test_only_torch_and_models_import_torch_at_module_level() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in core_modules()
        for name, line in imports_when_loaded(ast.parse(path.read_text(encoding="utf-8")).body)
        if name in ("torch", "transformers")
    ]
    assert found == []


def test_the_rest_of_the_core_imports_without_torch() -> None:
    """Also catches an import by way of another module."""
    names = []
    for path in core_modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    block = "import importlib, sys\nsys.modules.update(torch=None, transformers=None)"
    python("-c", f"{block}\nfor name in {names!r}: importlib.import_module(name)")


# --- an adapter that only encodes ------------------------------------------------------------------------------------


def loaded_to_encode(run_file: str, folder: Path | None = None) -> list[str]:
    """What a process loads that encodes a message, as each one does that plays; ``folder``: of a model, if not tiny."""
    return loaded_after(f"""
from pathlib import Path
from relax_core.config.resolve import resolve
from relax_core.config.yaml import read
from relax_core.run import Run, build_adapter
from relax_core.types import user
raw = read(Path({str(ROOT / "configs" / run_file)!r}))
if {folder is not None}:
    raw["model"] = {{"id": raw["model"]["id"], "path": {str(folder)!r}}}
config, stack = resolve(raw)
adapter, _ = build_adapter(Run(config, config.runs, stack))
assert adapter.encode([user("last of cat dog ?")]).ids
""")


@pytest.mark.parametrize("run_file", ["text-tiny.yaml", "omni-tiny.yaml"])
def test_a_tiny_adapter_encodes_without_torch(run_file: str) -> None:
    assert set(loaded_to_encode(run_file)) == {"transformers", "numpy"}


@pytest.mark.parametrize("run_file", ["text-tiny.yaml", "omni-tiny.yaml"])
def test_the_adapter_of_a_folder_encodes_without_the_code_of_models(run_file: str, tmp_path: Path) -> None:
    """transformers' classes of configs and tokenizers import torch themselves."""
    import torch

    from relax_core.config.resolve import load
    from relax_core.run import Run, build_adapter

    config, stack = load(ROOT / "configs" / run_file)
    adapter, _ = build_adapter(Run(config, config.runs, stack))
    adapter.save(adapter.load("cpu", torch.float32), tmp_path)
    assert set(loaded_to_encode(run_file, tmp_path)) == {"transformers", "numpy", "torch"}
