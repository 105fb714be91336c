"""Plugins written to a folder as if they were installed there: for tests of hooks and components."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

from relax_core.plugins import BUILT_IN, GROUP


def write_plugin(folder: Path, name: str, source: str, distribution: str = "", version: str = "1.0") -> Path:
    """Write a module ``<name>_plugin.py`` and the metadata of a distribution whose entry point ``name`` is that module.

    The folder must be on ``sys.path`` when the plugin is imported. Returns the module's file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    distribution = distribution or f"dist-{name}"
    module = f"{name.replace('-', '_')}_plugin"
    path = folder / f"{module}.py"
    path.write_text(source, encoding="utf-8")
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}\n")
    return path


def write_empty_suites(folder: Path) -> None:
    """Stand-ins for the built-in suites that provide nothing."""
    for name in BUILT_IN:
        write_plugin(folder, name, "", "suites-" + name)


def plugins_in(*folders: Path) -> Sequence[EntryPoint]:
    """The entry points of the distributions in some folders: what ``activate(..., installed=...)`` takes."""
    found = distributions(path=[str(folder) for folder in folders])
    return tuple(entry for dist in found for entry in dist.entry_points.select(group=GROUP))
