"""What a call's arguments must be: read by a function's annotations, or checked by a JSON schema."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from relax_core.errors import ConfigError, nearest

_MOST = 3
"""Problems of one call that are told."""


class Parameters:
    """Of a function, by its annotations: their JSON schema, and arguments read strictly.

    Raises ConfigError for parameters without a name or an annotation, or with one that JSON cannot give.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        taken = _parameters(function, where)
        self._names = {f"p{i}": name for i, name in enumerate(taken)}
        fields: dict[str, Any] = {  # names are aliases: a parameter may be called as a method of pydantic's models is
            field: (Annotated[kind, Field(alias=name)], default)
            for field, (name, (kind, default)) in zip(self._names, taken.items(), strict=True)
        }
        strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        try:
            self._model = create_model("Arguments", __config__=strict, **fields)
            schema = self._model.model_json_schema(schema_generator=_WithoutTitles)
        except PydanticUserError as error:
            line = " ".join(str(error).split())
            raise ConfigError(f"{where}: its parameters cannot be given as JSON: {line[:200]}") from error
        self.schema = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them; what has a default may be left out. Raises ValueError."""
        try:
            found = self._model.model_validate_json(json.dumps(dict(arguments)), strict=True)
        except ValidationError as error:
            raise ValueError(in_words([self._problem(one) for one in error.errors()])) from error
        return {self._names[field]: getattr(found, field) for field in found.model_fields_set}

    def _problem(self, error: Any) -> str:
        *above, last = error["loc"] or ("",)
        if error["type"] == "missing":
            return f"{_place(*above, last)} is missing"
        if error["type"] == "extra_forbidden":
            return _unknown(last, self._names.values() if not above else ())
        return f"{_place(*above, last)}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _parameters(function: Callable[..., Any], where: str) -> dict[str, tuple[Any, Any]]:
    """Annotation and default (... for none) by name."""
    found = inspect.signature(function).parameters.values()
    plain = function
    while hasattr(plain, "func"):  # functools.partial
        plain = plain.func
    if not inspect.isroutine(plain):
        plain = type(plain).__call__
    try:
        hints = typing.get_type_hints(plain, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{where}: its annotations cannot be read: {error}") from error
    given = {}
    for one in found:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise ConfigError(f"{where}: parameter {one.name!r} has no name in a call: name each argument")
        if one.name not in hints:
            raise ConfigError(f"{where}: parameter {one.name!r} does not say what it takes: write {one.name}: int, say")
        given[one.name] = (hints[one.name], ... if one.default is one.empty else one.default)
    return given


class _WithoutTitles(GenerateJsonSchema):
    """A policy reads the names already."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


# --- by a JSON schema -------------------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a string"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "array": ((list, tuple), "a list"),
    "object": ((Mapping,), "an object"),
    "null": ((type(None),), "null"),
}
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, bound: value >= bound, "at least"),
    "maximum": (lambda value, bound: value <= bound, "at most"),
    "exclusiveMinimum": (lambda value, bound: value > bound, "more than"),
    "exclusiveMaximum": (lambda value, bound: value < bound, "less than"),
}


def wrong(value: Any, schema: Any, *place: str | int) -> Iterator[str]:
    """What of a JSON value its schema does not allow, a line for each; see ``Tool.read`` for what is looked at."""
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{_place(*place)} must be {' or '.join(_KINDS[kind][1] for kind in kinds if kind in _KINDS)}"
        return
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and _json(value) not in map(_json, allowed):
        yield f"{_place(*place)} must be {' or '.join(map(_json, allowed))}"
    for word in ("anyOf", "oneOf"):
        if word in schema and all(any(True for _ in wrong(value, one, *place)) for one in schema[word]):
            yield f"{_place(*place)} is none of what is allowed"
    if _is(value, "number"):
        for word, (holds, words) in _BOUNDS.items():
            if word in schema and not holds(value, schema[word]):
                yield f"{_place(*place)} must be {words} {schema[word]}"
    elif isinstance(value, str):
        yield from _wrong_size(value, schema, "minLength", "maxLength", "characters", place)
    elif isinstance(value, list | tuple):
        yield from _wrong_size(value, schema, "minItems", "maxItems", "items", place)
        for i, one in enumerate(value):
            yield from wrong(one, schema.get("items"), *place, i)
    elif isinstance(value, Mapping):
        yield from _wrong_object(value, schema, place)


def _wrong_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: tuple[str | int, ...]) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{_place(*place, name)} is missing"
    for name, one in value.items():
        if name in properties:
            yield from wrong(one, properties[name], *place, name)
        elif schema.get("additionalProperties", True) is False:
            yield _unknown(name, properties)
        else:
            yield from wrong(one, schema.get("additionalProperties"), *place, name)


def _wrong_size(
    value: Sequence[Any], schema: Mapping[str, Any], least: str, most: str, what: str, place: tuple[str | int, ...]
) -> Iterator[str]:
    if len(value) < schema.get(least, 0):
        yield f"{_place(*place)} must have at least {schema[least]} {what}"
    if most in schema and len(value) > schema[most]:
        yield f"{_place(*place)} must have at most {schema[most]} {what}"


def _is(value: Any, kind: str) -> bool:
    if kind not in _KINDS:
        return True
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, _KINDS[kind][0])


# --- in words ---------------------------------------------------------------------------------------------------------


def in_words(problems: Sequence[str]) -> str:
    """Several problems on one line."""
    said = "; ".join(_short(" ".join(problem.split()), 300) for problem in problems[:_MOST])
    return said + (f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else "")


def quoted(text: str) -> str:
    """What a policy wrote, on one line and not much of it."""
    return _json(_short(text, 40))


def _unknown(name: str, known: typing.Iterable[str]) -> str:
    names = list(known)
    others = nearest(name, names) or (f"; there are {', '.join(map(_json, names))}" if names else "")
    return f"there is no argument {quoted(str(name))}{others}"


def _place(*place: str | int) -> str:
    return ".".join(str(one) if isinstance(one, int) else quoted(one) for one in place) or "this"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
