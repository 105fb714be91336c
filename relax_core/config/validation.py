"""Validation whose errors say where, what was found, what is allowed and what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from relax_core.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], raw: Mapping[str, Any], where: str = "", also: Sequence[str] = ()) -> M:
    """The model of plain data (as YAML or JSON give it). Raises ConfigError with one line per problem.

    ``where`` prefixes every path; ``also`` are keys that are allowed beside the model's and were taken out before.
    The data goes through JSON because a strict model takes text for paths and lists for tuples only from there.
    """
    try:
        text = json.dumps(raw)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where or 'run file'}: not plain data: {error}") from error
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(*explain(error, model, where, also)) from None


def explain(error: ValidationError, model: type[BaseModel], where: str = "", also: Sequence[str] = ()) -> list[str]:
    """One line for each wrong place; the alternatives of a union are joined by "or"."""
    places: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    items = error.errors(include_url=False)
    located = [_locate(model, item["loc"]) for item in items]
    reached = {
        (*place.parts, *([item["loc"][-1]] if item["type"] == "extra_forbidden" else []))
        for item, place in zip(items, located, strict=True)
    }
    for item, place in zip(items, located, strict=True):
        if item["type"].endswith(("_type", "too_short")) and _is_beside(tuple(place.parts), reached):
            continue  # another member of a union, when one of the right kind got further
        path = join(where, *place.parts)
        if item["type"].startswith("union_tag_"):
            places[join(path, "id")] = [_no_such_id(item)]
        elif item["type"] == "extra_forbidden":
            key = str(item["loc"][-1])
            names = [*_keys(place.here), *(() if place.parts else also)]
            places[join(path, key)] = [f"unknown key{nearest(key, names) or '; known are ' + ', '.join(names)}"]
        elif item["type"] == "missing":
            purpose = " ".join(place.around.get(str(item["loc"][-1]), "").split())
            places[path] = ["is missing; it is required" + (f": {purpose}" if purpose else "")]
        else:
            places.setdefault(path or "run file", []).append(_allowed(item, _keys(place.here)))
            # What a validator of a whole model says names the fields itself.
            if not (item["type"] == "value_error" and isinstance(item["input"], Mapping)):
                found[path or "run file"] = f"found {show(item['input'])}; "
    return [f"{path}: {found.get(path, '')}{' or '.join(dict.fromkeys(said))}" for path, said in places.items()]


def join(*parts: str | int) -> str:
    """A dotted path; empty parts are left out."""
    return ".".join(str(part) for part in parts if part != "")


def show(value: Any) -> str:
    """A value as a run file would write it, shortened."""
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# --- places ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    """A place of a model: its path, its annotation, and the fields (with descriptions) of the model around it."""

    parts: list[str | int]
    here: Any
    around: Mapping[str, str]


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> _Place:
    """Where an error is, without the tags by which pydantic names the members of a union."""
    place = _Place([], model, {})
    for part in loc:
        inner = _step(place.here, part)
        if inner is not None:
            place.around = _keys(place.here) or place.around
            place.parts.append(part)
            place.here = inner
        elif len(_choices(place.here)) > 1:
            place.here = _chosen(place.here, str(part))
        else:
            break
    return place


def _keys(annotation: Any) -> Mapping[str, str]:
    (choice, *others) = _choices(annotation) or [None]
    if others or not (isinstance(choice, type) and issubclass(choice, BaseModel)):
        return {}
    return {name: field.description or "" for name, field in choice.model_fields.items()}


def _choices(annotation: Any) -> list[Any]:
    """The members of a union, without None and without annotations."""
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [choice for member in get_args(annotation) for choice in _choices(member)]
    return [] if annotation is NoneType else [annotation]


def _chosen(annotation: Any, tag: str) -> Any:
    kind = tag.partition("[")[0]  # of a list: its origin
    named = [choice for choice in _choices(annotation) if getattr(choice, "__name__", "") in (tag, kind)]
    return (named or [choice for choice in _choices(annotation) if tag in _ids(choice)] or [None])[0]


def _ids(choice: Any) -> tuple[Any, ...]:
    """Of a model, the values of ``id`` by which a union chooses it."""
    field = getattr(choice, "model_fields", {}).get("id")
    return get_args(field.annotation) if field is not None else ()


def _is_beside(path: tuple[int | str, ...], reached: set[tuple[int | str, ...]]) -> bool:
    """Whether there is a problem further inside of a place."""
    return any(len(other) > len(path) and other[: len(path)] == path for other in reached)


def _step(annotation: Any, part: int | str) -> Any:
    """The annotation of a field, an item or a value; None where ``part`` is no such thing."""
    choices = _choices(annotation)
    if len(choices) != 1:
        return None
    choice, origin, args = choices[0], get_origin(choices[0]), get_args(choices[0])
    if isinstance(choice, type) and issubclass(choice, BaseModel):
        field = choice.model_fields.get(str(part))
        return field.annotation if field else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return args[1]
    if isinstance(origin, type) and issubclass(origin, Collection) and isinstance(part, int) and args:
        one_for_all = len(args) == 1 or args[1] is Ellipsis
        return args[0] if one_for_all else args[min(part, len(args) - 1)]
    return None


# --- words ----------------------------------------------------------------------------------------------------------


def _allowed(item: ErrorDetails, keys: Mapping[str, str]) -> str:
    """What is allowed at an error's place, with a hint when what was meant is clear."""
    if item["type"] == "literal_error" or item["type"] == "enum":
        expected = item["ctx"]["expected"]
        near = nearest(item["input"], re.findall("'([^']*)'", expected)) if isinstance(item["input"], str) else ""
        return f"allowed are {expected}{near}"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = re.sub(
        r"^(?:Input|[A-Z][a-z]+) should (?:be )?", lambda m: "must " + ("be " if "be " in m[0] else ""), message
    )
    message = message.replace("be an object", "be a mapping").replace("be a valid array", "be a list")
    return message.replace(" after validation", "") + _hint(item, keys)


def _no_such_id(item: ErrorDetails) -> str:
    """Of a section whose ``id`` chooses what it is."""
    if item["type"] == "union_tag_not_found":
        return "is missing; it is required: what the section is of"
    tag, expected = item["ctx"]["tag"], item["ctx"]["expected_tags"]
    near = nearest(tag, re.findall("'([^']*)'", expected))
    return f"found {tag!r}; allowed are {expected}{near}"


def _hint(item: ErrorDetails, keys: Mapping[str, str]) -> str:
    found, kind = item["input"], item["type"]
    if kind.startswith("int") and isinstance(found, float) and found.is_integer():
        return f"; write {int(found)}"
    if (
        kind.startswith(("int", "float"))
        and isinstance(found, str)
        and re.fullmatch(r"[-+]?[0-9.]+(?:e[-+]?\d+)?", found)
    ):
        return "; leave the quotes out"
    if kind.startswith("bool") and str(found).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return f"; write {'true' if str(found).lower() in ('true', 'yes', 'on', '1') else 'false'}"
    if kind == "string_type" and isinstance(found, bool | int | float):
        return f"; write {json.dumps(json.dumps(found))}"
    if kind in ("model_type", "model_attributes_type") and isinstance(found, str) and "id" in keys:
        return f"; write {{id: {found}}}"
    if kind.endswith("tuple_type") and isinstance(found, str):
        return f"; write [{found}]"
    return ""
