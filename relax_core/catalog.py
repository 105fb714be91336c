"""What is installed: every plugin and its components, for ``relax plugins``; a broken plugin is listed as such."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from relax_core.errors import ConfigError, PluginError, nearest
from relax_core.hook_manager import hook_problems
from relax_core.interfaces import Component
from relax_core.plugins import (
    BASES,
    BUILT_IN,
    activate,
    distribution,
    find_plugin,
    installed_plugins,
    load_plugin,
    provided_by,
    who,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One component of one installed plugin; without ``id``: the plugin itself, when it provides none or is broken."""

    plugin: str
    distribution: str
    kind: str = ""
    id: str = ""
    component: Component | None = None
    error: str = ""


def catalog(installed: Sequence[EntryPoint] | None = None) -> list[Entry]:
    """Every component of every installed plugin, the built-in suites first."""
    found = installed_plugins() if installed is None else tuple(installed)
    names = dict.fromkeys([*BUILT_IN, *sorted(entry.name for entry in found)])
    return [listed for name in names for listed in _of_plugin(name, found)]


def _of_plugin(name: str, installed: Sequence[EntryPoint]) -> Iterator[Entry]:
    try:
        entry = find_plugin(name, installed)
    except PluginError as error:
        yield Entry(name, "", error=str(error))
        return
    dist = distribution(entry)
    try:
        plugin = load_plugin(entry)
        for problem in hook_problems(plugin):
            raise PluginError(f"{who(entry)}: {problem}")
        listed = [
            Entry(name, dist, kind, key, component)
            for kind in BASES
            if (function := getattr(plugin, f"relax_{kind}", None)) is not None
            for key, component in provided_by(function, f"relax_{kind}", who(entry)).items()
        ]
    except PluginError as error:
        yield Entry(name, dist, error=str(error))
        return
    yield from listed or [Entry(name, dist)]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a component's Config, as text."""

    name: str
    type: str
    default: str
    doc: str


def settings(entry: Entry, installed: Sequence[EntryPoint] | None = None) -> list[Setting]:
    """The settings of a component. Imports its class only when that is light."""
    stack = activate([entry.plugin] if entry.plugin not in BUILT_IN else [], installed=installed)
    return list(_fields(stack.config_class(entry.kind, entry.id)))


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every field; those of a nested model follow it under dotted names."""
    for name, field in model.model_fields.items():
        required = field.is_required()
        default = "required" if required else _shown(field.get_default(call_default_factory=True))
        doc = " ".join((field.description or "").replace("``", "`").split())
        yield Setting(prefix + name, type_name(field.annotation), default, doc)
        for inner in _models(field.annotation):
            yield from _fields(inner, f"{prefix}{name}.")


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, default=str)


def type_name(annotation: Any) -> str:
    """A type as a user reads it: ``int | null``, ``'a' | 'b'``, ``list of float``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, args))
    if origin in (tuple, list, set, frozenset, Sequence):
        names = dict.fromkeys(type_name(arg) for arg in args if arg is not Ellipsis)
        count = f"{len(args)} " if origin is tuple and Ellipsis not in args else ""
        return f"list of {count}{' and '.join(names)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping to {type_name(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    words: dict[Any, str] = {str: "text", bool: "true | false", NoneType: "null", Path: "path"}
    return words.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation, those in lists and mappings aside."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return [model for arg in get_args(annotation) for model in _models(arg)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def find(id: str, entries: Sequence[Entry]) -> list[Entry]:
    """The components called ``id``, of whatever kind. Raises ConfigError with the nearest id."""
    found = [entry for entry in entries if entry.id == id]
    if not found:
        known = {entry.id for entry in entries if entry.id}
        raise ConfigError(f"no component has the id {id!r}{nearest(id, known)}; relax plugins lists them")
    return found
