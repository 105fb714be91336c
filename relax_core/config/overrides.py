"""Overrides from the command line: ``algorithm.clip_low=0.2``, ``rewards.0.weight=2``, ``evaluation.text.size=64``."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from relax_core.config import yaml
from relax_core.config.schema import RunConfig
from relax_core.errors import ConfigError, nearest


def apply(raw: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of a run file's data with each override set, in order. Raises ConfigError for one that fits nowhere.

    Lists are entered by index, or by the name (or id) of an item. Values are YAML. A key that the file leaves out is
    added; validation refuses it later where no such setting exists.
    """
    data = copy.deepcopy(raw)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"override {override!r}: write it as path=value, such as algorithm.clip_low=0.2")
        value = yaml.load(text, f"override {override!r}")
        _set(data, path.strip(), value)
    return data


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    if "" in path.split("."):
        raise ConfigError(f"override {path}: a part of the path is empty; write it like algorithm.clip_low=0.2")
    first = path.split(".")[0]
    if first not in RunConfig.model_fields:
        raise ConfigError(f"override {path}: a run file has no {first!r}{nearest(first, RunConfig.model_fields)}")
    here: Any = data
    done = ""
    rest = path
    while True:
        key, rest = _next_key(here, rest, path, done)
        done = f"{done}.{key}" if done else str(key)
        if not rest:
            here[key] = value
            return
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]


def _next_key(here: Any, rest: str, path: str, done: str) -> tuple[Any, str]:
    """The key or index that ``rest`` begins with at this place, and what remains of ``rest``."""
    if isinstance(here, dict):
        return _longest(here, rest) or _split(rest)
    if isinstance(here, list):
        labels = [_label(item) for item in here]
        known = [label for label in labels if label]
        found = _longest(known, rest)
        if found:
            label, remaining = found
            if labels.count(label) > 1:
                raise ConfigError(
                    f"override {path}: {done} has {labels.count(label)} items named {label!r}; use an index"
                )
            return labels.index(label), remaining
        key, remaining = _split(rest)
        if key.isdecimal() and int(key) < len(here):
            return int(key), remaining
        places = [*known, *(["0"] if len(here) == 1 else [f"0 to {len(here) - 1}"] if here else [])]
        hint = nearest(key, known) or f"; there are {', '.join(places) or 'none'}"
        raise ConfigError(f"override {path}: {done} has no item {key!r}{hint}")
    raise ConfigError(f"override {path}: {done} is {here!r:.40} and has nothing inside")


def _longest(known: Iterable[str], rest: str) -> tuple[str, str] | None:
    """The longest known key that ``rest`` begins with (names may hold dots)."""
    fits = [key for key in known if rest == key or rest.startswith(f"{key}.")]
    if not fits:
        return None
    key = max(fits, key=len)
    return key, rest[len(key) + 1 :]


def _split(rest: str) -> tuple[str, str]:
    key, _, remaining = rest.partition(".")
    return key, remaining


def _label(item: Any) -> str:
    if not isinstance(item, dict):
        return ""
    label = item.get("name") or item.get("id") or ""
    return label if isinstance(label, str) else ""
