"""Renders a plugin: names checked first, then every file written, then what to do with it said."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from relax_core.errors import ConfigError, nearest
from relax_core.new_plugin.kinds import KINDS, RUN, Kind

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
PREFIX = "relax-plugin-"
SUFFIX = ".tmpl"
TESTED = "tested.py"
"""Becomes ``tests/test_*.py``: a wheel of ours holds nothing of that name."""


@dataclass(frozen=True, slots=True)
class Names:
    """Of a plugin: in ``plugins:`` of run files, of its distribution, of its package."""

    name: str
    distribution: str
    package: str


def main(name: str, kinds: Sequence[str], folder: Path | None = None) -> int:
    """Write the plugin and say what to do next. Raises ConfigError; then nothing was written."""
    chosen, names = chosen_kinds(kinds), names_of(name)
    folder = folder or Path(names.distribution)
    problems = [*_taken(names, chosen), *_occupied(folder)]
    if problems:
        raise ConfigError(problems[0])
    rendered = render(names, chosen)
    try:
        for path, text in rendered.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--folder: {folder} cannot be written ({error.strerror}): choose another") from error
    print(f"{folder}: {len(rendered)} files. Now:\n  cd {folder}\n  pip install -e .\n  relax check run.yaml")
    print("  python -m pytest\n  relax train run.yaml")
    return 0


def chosen_kinds(kinds: Sequence[str]) -> list[Kind]:
    """The kinds of these names, in the order of ``KINDS``. Raises ConfigError for none and for an unknown one."""
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--kind: found {kind!r}{nearest(kind, KINDS)}; allowed are {', '.join(KINDS)}")
    if not kinds:
        raise ConfigError(f"--kind: found none; give one or more of {', '.join(KINDS)}")
    return [kind for name, kind in KINDS.items() if name in kinds]


def names_of(name: str) -> Names:
    """``zoom-in`` and ``relax-plugin-zoom-in`` name the same plugin. Raises ConfigError for what can name none."""
    short = name.removeprefix(PREFIX)
    if not NAME.fullmatch(short):
        raise ConfigError(
            f"NAME: found {name!r}; a plugin's name is of lower-case letters a-z and digits, begins with a letter, and "
            "may join words by '-' or '_', such as zoom-in"
        )
    return Names(short, PREFIX + short.replace("_", "-"), (PREFIX + short).replace("-", "_"))


def _taken(names: Names, kinds: Sequence[Kind]) -> Iterator[str]:
    """What is installed under these names already."""
    from relax_core.catalog import catalog
    from relax_core.plugins import distribution, installed_plugins

    for point in installed_plugins():
        if point.name == names.name:
            yield f"NAME: a plugin {names.name!r} is installed already ({distribution(point)}): choose another name"
    if importlib.util.find_spec(names.package) is not None:
        yield f"NAME: a package {names.package} can be imported already: choose another name"
    ids = {f"{names.name}-{kind.id}" for kind in kinds}
    for component in catalog():
        if component.id in ids:
            yield f"NAME: {component.distribution} has a component {component.id!r} already: choose another name"


def _occupied(folder: Path) -> Iterator[str]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "a folder that is not empty" if folder.is_dir() else "a file"
        yield f"--folder: {folder} is {what}: choose another, or remove it"


def render(names: Names, kinds: Sequence[Kind]) -> dict[str, str]:
    """Path in the distribution -> text of each file."""
    values = {"name": names.name, "distribution": names.distribution, "package": names.package}
    run = dict(RUN)
    for kind in kinds:
        for key, text in kind.run.items():
            run[key] = run[key] + text if key == "more" else text
    values |= {key: Template(text).substitute(values) for key, text in run.items()}
    values |= {
        "providers": "".join(map(_provider, kinds)),
        "imports": "".join(f"from $package.{k.name}_config import {k.config}\n" for k in kinds if k.config),
        "table": "".join(f"| `$package/{kind.name}.py` | `$name-{kind.id}`: {kind.about} |\n" for kind in kinds),
    }
    for key in ("providers", "imports", "table"):
        values[key] = Template(values[key]).substitute(values)
    if values["imports"]:
        values["imports"] = "\n" + values["imports"]
    return dict(_rendered(names, kinds, values))


def _rendered(names: Names, kinds: Sequence[Kind], values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    home = files("relax_core.new_plugin") / "files"
    for name in ("pyproject.toml", "README.md", "run.yaml"):
        yield name, _filled(home / (name + SUFFIX), values)
    for name in ("__init__.py", "plugin.py"):
        yield f"{names.package}/{name}", _filled(home / (name + SUFFIX), values)
    yield f"{names.package}/py.typed", ""
    yield "tests/test_run.py", _filled(home / (TESTED + SUFFIX), values)
    for kind in kinds:
        for file in sorted((home / kind.name).iterdir(), key=lambda file: file.name):
            name = file.name.removesuffix(SUFFIX)
            path = f"tests/test_{kind.name}.py" if name == TESTED else f"{names.package}/{name}"
            yield path, _filled(file, values)


def _filled(file: Traversable, values: Mapping[str, str]) -> str:
    return Template(file.read_text(encoding="utf-8")).substitute(values)


def _provider(kind: Kind) -> str:
    """The function of ``plugin.py`` that offers it."""
    config = f"            {kind.config},\n" if kind.config else ""
    return f'''

def {kind.provider}() -> Mapping[str, Component]:
    return {{
        "$name-{kind.id}": Component(
            "$package.{kind.name}:{kind.cls}",
{config}            summary="{kind.summary}",
        ),
    }}
'''
