"""The page docs/config.md: every setting of a run file and of its components, from the schemas that validate them.

# the built-in suites, and the plugins that are named
python -m relax_core.config.document omni ray sglang deepeyes genrm > docs/config.md
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relax_core.config.resolve import SLOTS, Slot
from relax_core.config.schema import RunConfig
from relax_core.plugins import Stack, activate

Schema = Mapping[str, Any]


class Row(NamedTuple):
    """A line of a table, as Markdown but for ``name``."""

    name: str
    type: str
    default: str
    meaning: str


HEAD = """\
# Settings

Generated from the schemas that validate a run file; do not edit. To write it again:
`{command}`

A run file is YAML. An unknown key is an error that names the nearest right one. Any value can be overridden on the
command line: `relax train run.yaml max_staleness=2 algorithm.clip_low=0.1 rewards.exact.weight=2`; an item of a list
goes by its index, its name or its id. A section with an `id` belongs to a component; what the id selects validates its
other keys. `relax plugins ID` prints the settings of one component, `relax schema` a JSON Schema for editors. Relative
paths start at the folder in which the command is called.
"""

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
WORDS = {"string": "text", "integer": "int", "number": "number", "boolean": "bool", "null": "null"}


def page(plugins: Sequence[str]) -> str:
    """The whole page. Raises PluginError for a plugin that is not installed."""
    stack = activate(plugins)
    schema = RunConfig.model_json_schema()
    slots = {slot.field: slot for slot in SLOTS}
    command = " ".join(["python -m relax_core.config.document", *plugins, "> docs/config.md"])
    parts = [HEAD.format(command=command), "## The run file\n", table(_run_rows(schema, slots))]
    for name, field in schema["properties"].items():
        slot, section = slots.get(name), _section(field, schema)
        if section is not None:
            each = "Of each item:\n\n" if "items" in field else ""
            own = {key: value for key, value in section["properties"].items() if key != "id" or slot is None}
            rows = [row for key in own for row in _section_rows(key, section, schema)]
            parts += [f"## {name}\n", *([each + table(rows)] if rows else [])]
        if slot is not None:
            known = stack.components(slot.kind)
            parts += ["".join(_component(stack, slot, id)) for id in known] or ["No built-in component.\n"]
    return "\n".join(parts)


# --- the run file's own fields ----------------------------------------------------------------------------------------


def _run_rows(schema: Schema, slots: Mapping[str, Slot]) -> Iterator[Row]:
    for name, field in schema["properties"].items():
        row = _run_row(name, field, schema, schema)
        if _section(field, schema) is not None:
            kind = "component" if name in slots else "mapping"
            listed = f"list of {kind}s{_filled(field)}"
            row = row._replace(type=listed if "items" in field else kind, default=_default(row, field))
        yield row


def _section_rows(name: str, section: Schema, schema: Schema) -> Iterator[Row]:
    """A field of a section. One of a section that stands nowhere by itself is followed by its own fields."""
    field = section["properties"][name]
    inner = _section(field, schema)
    if inner is None or name in schema["properties"]:
        yield _run_row(name, field, section, schema)
        return
    row = _row(name, field, section, schema)
    yield row._replace(
        default="", meaning=row.meaning or " ".join(inner.get("description", "").replace("``", "`").split())
    )
    yield from rows(inner, schema, f"{name}.")


def _default(row: Row, field: Schema) -> str:
    """That of a section: its fields' defaults are in a table of their own."""
    value = field.get("default")
    return "see there" if isinstance(value, Mapping) and "id" not in value else row.default


def _run_row(name: str, field: Schema, around: Schema, schema: Schema) -> Row:
    row = _row(name, field, around, schema)
    nested = _section(field, schema) is not None
    return row._replace(meaning=f"{row.meaning} See [{name}](#{name}).".strip()) if nested else row


def _section(field: Schema, schema: Schema) -> Schema | None:
    """The model behind a field of the run file, be it the field's own, an item's or one of a union's."""
    for found in (field, field.get("items", {}), *field.get("anyOf", [])):
        if "$ref" in found:
            return _resolved(found, schema)
    return None


# --- components -------------------------------------------------------------------------------------------------------


def _component(stack: Stack, slot: Slot, id: str) -> Iterator[str]:
    provided = stack.provided(slot.kind, id)
    model = stack.config_class(slot.kind, id)
    described = stack.load(slot.kind, id) if stack.is_light(slot.kind, id) else model
    summary = provided.component.summary.rstrip(".")
    origin = "" if stack.versions[provided.plugin].startswith("relax-rl ") else f" Plugin `{provided.plugin}`."
    yield f"### {slot.field}: `{id}`\n\n{summary[:1].upper()}{summary[1:]}.{origin}\n\n"
    if vars(described).get("__doc__"):
        yield inspect.cleandoc(described.__doc__ or "").replace("``", "`") + "\n\n"
    schema = model.model_json_schema()
    yield table(rows(schema, schema)) if schema["properties"] else "No settings.\n"


def rows(model: Schema, schema: Schema, prefix: str = "") -> Iterator[Row]:
    """Every field; those of a nested model follow it under dotted names."""
    for name, field in model["properties"].items():
        yield _row(prefix + name, field, model, schema)
        inner = _section(field, schema) if "items" not in field else None
        if inner is not None:
            yield from rows(inner, schema, f"{prefix}{name}.")
        for kind, choice in _kinds(field, schema).items():
            yield from rows(choice, schema, f"{prefix}{name}.{kind}.")


def _kinds(field: Schema, schema: Schema) -> Mapping[str, Schema]:
    """The models that an item may be of, by the ``id`` that chooses one; without that."""
    found = {}
    for kind, ref in field.get("items", {}).get("discriminator", {}).get("mapping", {}).items():
        model = _resolved({"$ref": ref}, schema)
        found[kind] = {**model, "properties": {key: value for key, value in model["properties"].items() if key != "id"}}
    return found


# --- one field --------------------------------------------------------------------------------------------------------


def _row(name: str, field: Schema, around: Schema, schema: Schema) -> Row:
    required = name.rpartition(".")[2] in around.get("required", ())
    default = "required" if required else f"`{shown(field.get('default', {}))}`"
    meaning = " ".join(field.get("description", "").replace("``", "`").split())
    return Row(name, type_of(field, schema), default, meaning)


def _resolved(field: Schema, schema: Schema) -> Schema:
    found: Schema = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return found


def type_of(field: Schema, schema: Schema) -> str:
    """A type and its bounds in words: ``int > 0 or null``, ``list of text``, `` `a` or `b` ``."""
    if "$ref" in field:
        return "mapping"
    if "discriminator" in field:
        return f"mapping with `id` {_any([f'`{kind}`' for kind in field['discriminator']['mapping']])}"
    if "anyOf" in field:
        return _any([type_of(choice, schema) for choice in field["anyOf"]])
    if "enum" in field or "const" in field:
        return _any([f"`{value}`" for value in field.get("enum", [field.get("const")])])
    if field["type"] == "array":
        if "prefixItems" in field:
            kinds = dict.fromkeys(type_of(item, schema) for item in field["prefixItems"])
            return f"list of {len(field['prefixItems'])}: {' and '.join(kinds)}"
        return f"list of {type_of(field['items'], schema)}{_filled(field)}"
    if field["type"] == "object":
        values = field.get("additionalProperties")
        return f"mapping to {type_of(values, schema)}" if isinstance(values, Mapping) else "mapping"
    word = "path" if field.get("format") == "path" else WORDS[field["type"]]
    pattern = f" like `{field['pattern']}`" if "pattern" in field else ""
    bounds = [f"{sign} {shown(field[key])}" for key, sign in BOUNDS.items() if key in field]
    return " ".join([word + pattern, ", ".join(bounds)]).strip()


def _filled(field: Schema) -> str:
    return ", not empty" if field.get("minItems") == 1 else ""


def _any(choices: list[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def shown(value: Any) -> str:
    """A value as a run file would write it."""
    return '""' if value == "" else json.dumps(value, ensure_ascii=False).replace('"', "")


def table(rows: Iterable[Row]) -> str:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, *rest in rows:
        lines.append(" | ".join([f"| `{name}`", *(cell.replace("|", "\\|") for cell in rest)]).rstrip() + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(sys.argv[1:]))
