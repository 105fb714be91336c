"""Reading and writing YAML: the scalars of YAML 1.2, no key twice, only text as keys, nothing but plain data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from relax_core.errors import ConfigError

_TAG = "tag:yaml.org,2002:"

_PLAIN: list[tuple[str, str, list[str]]] = [
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
]
"""Which unquoted text is not a string. ``1e-6`` is a number; ``on``, ``0123``, ``1_000`` and dates are text."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in _PLAIN:
        for first in firsts:
            table.setdefault(first, []).append((_TAG + tag, re.compile(f"(?:{pattern})\\Z")))
    return table


class Loader(yaml.SafeLoader):
    """Plain data only: no dates, no sets, no tags of Python."""

    yaml_implicit_resolvers = _resolvers()
    yaml_constructors = {
        tag: function
        for tag, function in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys where each mapping is written, before ``<<`` is merged into it."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == _TAG + "merge":
                continue
            if key.tag != _TAG + "str":
                shown = key.value if isinstance(key.value, str) else "a list or mapping"
                raise ConstructorError(None, None, f"a key must be text, found {shown}; quote it", key.start_mark)
            if key.value in lines:
                problem = f"{key.value!r} is already set in line {lines[key.value]}; leave one out"
                raise ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


class Dumper(yaml.SafeDumper):
    """Quotes exactly what ``Loader`` would not read back as text, and writes no anchors."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Line ends that only Unicode knows are escaped: as they are, YAML reads some of them back as a newline."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar(_TAG + "str", data, style=style)


Dumper.add_representer(str, Dumper.represent_str)


def load(text: str, where: str = "value") -> Any:
    """Parse YAML text, or one value such as ``1e-6``. Raises ConfigError with ``where`` and the line."""
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        raise ConfigError(f"{where}:{line} {_problem(error)}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    context = f"{error.context}: " if error.context else ""
    return f"{context}{error.problem}"


def read(path: Path) -> dict[str, Any]:
    """The mapping in a run file. Raises ConfigError when there is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_neighbours(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name a run file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a run file is YAML") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    data = load(text, str(path))
    if data is None:
        raise ConfigError(f"{path}: is empty; a run file is a YAML mapping that begins like 'name: my-run'")
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"{data!r:.40}"
        raise ConfigError(f"{path}: found {kind}; a run file is a YAML mapping that begins like 'name: my-run'")
    return data


def _neighbours(path: Path) -> str:
    """Run files beside a missing one."""
    from difflib import get_close_matches

    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    names = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    close = get_close_matches(path.name, names, 1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def dump(data: Any) -> str:
    """YAML text that ``load`` reads back as equal data."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
