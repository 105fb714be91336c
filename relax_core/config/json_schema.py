"""The JSON Schema of a run file (draft 2020-12), for editors: with the settings of every active component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from relax_core.config.resolve import SLOTS, Slot
from relax_core.config.schema import ComponentSection, RunConfig
from relax_core.plugins import Stack

_REF = "#/$defs/{model}"


def run_schema(stack: Stack) -> dict[str, Any]:
    """Describes and checks run files that name the plugins of ``stack``."""
    schema = RunConfig.model_json_schema(ref_template=_REF)
    definitions = schema.setdefault("$defs", {})
    for slot in SLOTS:
        variants = {
            key: _component(slot, key, stack, definitions, schema["$defs"][slot.section.__name__])
            for key in stack.components(slot.kind)
        }
        name = f"{slot.kind} component"
        definitions[name] = {"oneOf": list(variants.values())} if variants else False
        _replace(schema["properties"][slot.field], slot.section.__name__, _REF.format(model=name))
        _allow_default(schema["properties"][slot.field], slot, variants)
    for section in {slot.section.__name__ for slot in SLOTS}:
        definitions.pop(section, None)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "Relax run file",
        "description": f"With plugins: {', '.join(f'{name} ({dist})' for name, dist in stack.versions.items())}.",
        **{key: value for key, value in schema.items() if key not in ("title", "description")},
    }


def _component(
    slot: Slot, key: str, stack: Stack, definitions: dict[str, Any], section: Mapping[str, Any]
) -> dict[str, Any]:
    """A section whose id is ``key``: the section's own fields and those of the component's Config."""
    model = stack.config_class(slot.kind, key)
    config = model.model_json_schema(ref_template=_REF.replace("{model}", f"{slot.kind}.{key}.{{model}}"))
    for name, definition in config.pop("$defs", {}).items():
        definitions[f"{slot.kind}.{key}.{name}"] = definition
    component = stack.components(slot.kind)[key]
    return {
        "title": key,
        "description": component.summary or config.get("description", ""),
        "type": "object",
        "properties": {
            **section["properties"],
            "id": {"const": key, "description": component.summary},
            **config.get("properties", {}),
        },
        "required": ["id", *config.get("required", [])],
        "additionalProperties": False,
    }


def _replace(schema: Any, section: str, ref: str) -> None:
    """Point every reference to a section's model at the components instead."""
    if isinstance(schema, dict):
        if schema.get("$ref") == _REF.format(model=section):
            schema["$ref"] = ref
        for value in schema.values():
            _replace(value, section, ref)
    elif isinstance(schema, list):
        for value in schema:
            _replace(value, section, ref)


def _allow_default(field: dict[str, Any], slot: Slot, variants: Mapping[str, dict[str, Any]]) -> None:
    """A section with a default may leave out the id."""
    default = RunConfig.model_fields[slot.field].default
    if isinstance(default, ComponentSection) and default.id in variants:
        variant = variants[default.id]
        variant["required"] = [name for name in variant["required"] if name != "id"]
        field["default"] = {"id": default.id}
