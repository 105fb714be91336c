"""Functions as tools: what they declare, how arguments are read, and what they may give back."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from relax_core.errors import ConfigError
from relax_core.types import Decoded, Image, Text, ToolResult, ToolSpec
from relax_envs.tools import Tool, ToolError, function_tool, tool
from relax_envs.tools.parameters import wrong
from relax_envs.tools.tool import NOTHING, parts_of

PICTURE = Image(Decoded("image", np.zeros((4, 4, 3), np.uint8)))


@tool
def look(at: int, how: Literal["near", "far"] = "near") -> str:
    """Says what is at a place."""
    return f"{how} {at}"


class Box(BaseModel):
    left: int
    right: int


def call(made: Tool, **arguments: Any) -> Any:
    return asyncio.run(made(made.read(arguments)))


def refused(made: Tool, **arguments: Any) -> str:
    with pytest.raises(ToolError) as error:
        made.read(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is declared -------------------------------------------------------------------------------------------------


def test_a_function_declares_its_name_docstring_and_annotations() -> None:
    assert look.spec == ToolSpec(
        "look",
        "Says what is at a place.",
        {
            "type": "object",
            "properties": {
                "at": {"type": "integer"},
                "how": {"type": "string", "enum": ["near", "far"], "default": "near"},
            },
            "required": ["at"],
        },
    )


def test_name_and_description_can_be_given() -> None:
    @tool(name="see", description="Sees.")
    def other(at: Annotated[int, Field(ge=1, description="which")]) -> str:
        """Not this."""
        return str(at)

    assert (other.name, other.description) == ("see", "Sees.")
    assert other.parameters["properties"] == {"at": {"type": "integer", "minimum": 1, "description": "which"}}


def test_parameters_may_have_the_names_of_anything() -> None:
    @tool
    def odd(json: int, model_dump: int, schema: int = 2, _hidden: int = 3) -> str:
        return f"{json} {model_dump} {schema} {_hidden}"

    assert list(odd.parameters["properties"]) == ["json", "model_dump", "schema", "_hidden"]
    assert call(odd, json=1, model_dump=5, _hidden=4) == "1 5 2 4"


def unannotated(at) -> str:  # type: ignore[no-untyped-def]
    return str(at)


def anything(*at: int) -> str:
    return str(at)


def thread_taker(at: threading.Thread) -> str:
    return str(at)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (unannotated, "tool unannotated: parameter 'at' does not say what it takes: write at: int, say"),
        (anything, "tool anything: parameter 'at' has no name in a call: name each argument"),
        (thread_taker, "tool thread_taker: its parameters cannot be given as JSON"),
    ],
)
def test_a_function_that_cannot_be_called_by_json_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        function_tool(function)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_read_strictly() -> None:
    assert call(look, at=3) == "near 3"
    assert refused(look) == '"at" is missing'
    assert refused(look, at="3") == '"at": input should be a valid integer'
    assert refused(look, at=True) == '"at": input should be a valid integer'
    assert refused(look, at=3, how="loud") == "\"how\": input should be 'near' or 'far'"
    assert refused(look, at=3, hwo="far") == "there is no argument \"hwo\"; did you mean 'how'?"
    assert refused(look, at=3, colour=1) == 'there is no argument "colour"; there are "at", "how"'


def test_what_is_wrong_repeats_little_of_what_was_written() -> None:
    names = {f"{'x' * 500}\n{i}": i for i in range(20)}
    said = refused(look, at=1, **names)
    assert said.endswith("; and 17 more") and len(said) < 500


def test_nested_arguments_come_as_what_the_annotations_say() -> None:
    @tool
    def crop(box: Box, sides: tuple[int, int], names: set[str]) -> str:
        assert isinstance(box, Box)
        return f"{box.left} {box.right} {sides} {sorted(names)}"

    assert call(crop, box={"left": 1, "right": 2}, sides=[3, 4], names=["b", "a"]) == "1 2 (3, 4) ['a', 'b']"
    problem = refused(crop, box={"left": "1"}, sides=[3, 4], names=[])
    assert problem == '"box"."left": input should be a valid integer; "box"."right" is missing'
    assert "titles" not in str(crop.parameters)


def test_unicode_arrives_unchanged() -> None:
    @tool
    def echo(text: str) -> dict[str, str]:
        return {"said": text}

    assert call(echo, text="北京 مرحبا 👍 \u0000") == '{"said": "北京 مرحبا 👍 \\u0000"}'


# --- calls ------------------------------------------------------------------------------------------------------------


def test_async_functions_run_on_the_loop_and_blocking_ones_in_threads() -> None:
    place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")

    @tool
    async def here() -> bool:
        await asyncio.sleep(0)
        return threading.current_thread() is threading.main_thread()

    @tool
    def there() -> str:
        assert threading.current_thread().daemon
        return f"{threading.current_thread() is threading.main_thread()} {place.get()}"

    place.set("home")
    assert call(here) == "true"
    assert call(there) == "False home"


def test_a_thread_that_does_not_return_holds_nothing_up() -> None:
    released = threading.Event()

    @tool
    def hang() -> None:
        released.wait(60)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hang({}), 0.05)

    begun = time.monotonic()
    asyncio.run(impatient())
    assert time.monotonic() - begun < 30
    released.set()


def test_methods_and_partials_are_tools_too() -> None:
    class State:
        def __init__(self) -> None:
            self.sum = 0

        def add(self, n: int) -> int:
            """Adds."""
            self.sum += n
            return self.sum

    def scale(by: int, n: int) -> int:
        return by * n

    state = State()
    add = function_tool(state.add)
    assert (call(add, n=2), call(add, n=3), add.description) == ("2", "5", "Adds.")
    double = function_tool(partial(scale, 2), name="double", description="")
    assert list(double.parameters["properties"]) == ["n"] and call(double, n=4) == "8"


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("text", (Text("text"),)),
        (PICTURE, (PICTURE,)),
        (["a", PICTURE, Text("b")], (Text("a"), PICTURE, Text("b"))),
        (None, (Text(NOTHING),)),
        ("", (Text(NOTHING),)),
        ([], (Text(NOTHING),)),
        (["", PICTURE], (PICTURE,)),
    ],
)
def test_outputs_become_parts(given: Any, parts: Any) -> None:
    assert parts_of(given) == parts


@pytest.mark.parametrize("given", [object(), [object()], ToolResult(()), [ToolSpec("a", "", {})], {"a"}])
def test_other_outputs_are_an_error_of_the_tool(given: Any) -> None:
    with pytest.raises(TypeError, match=r"it gave back a \w+; text, Image, Audio, Video"):
        parts_of(given)


def test_values_of_functions_become_json() -> None:
    for value, text in ((1.5, "1.5"), (True, "true"), ({"ß": [1]}, '{"ß": [1]}'), ([1, "a"], '[1, "a"]')):
        assert call(giving(value)) == text
    assert call(giving(["a", PICTURE])) == ["a", PICTURE]


def giving(value: Any) -> Tool:
    return function_tool(lambda: value, name="give")


# --- schemas by hand --------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "box": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 4, "maxItems": 4},
        "label": {"type": ["string", "null"], "maxLength": 5},
        "side": {"enum": ["left", "right", 1]},
        "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    },
    "required": ["box"],
    "additionalProperties": False,
}
BOX = [0, 1, 2.5, 3]


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({"box": BOX, "label": None, "side": "left", "deep": {"a": True, "b": 1}, "either": "x"}, []),
        ({}, ['"box" is missing']),
        ({"box": [1, 2, 3]}, ['"box" must have at least 4 items']),
        ({"box": [1, 2, 3, -4]}, ['"box".3 must be at least 0']),
        ({"box": [1, 2, 3, True]}, ['"box".3 must be a number']),
        ({"box": "1,2,3,4"}, ['"box" must be a list']),
        ({"box": BOX, "label": 3}, ['"label" must be a string or null']),
        ({"box": BOX, "label": "longer"}, ['"label" must have at most 5 characters']),
        ({"box": BOX, "side": True}, ['"side" must be "left" or "right" or 1']),
        ({"box": BOX, "deep": {}}, ['"deep"."a" is missing']),
        ({"box": BOX, "either": 1.5}, ['"either" is none of what is allowed']),
        ({"box": BOX, "bix": 1}, ["there is no argument \"bix\"; did you mean 'box'?"]),
    ],
)
def test_a_schema_by_hand_is_checked(arguments: Any, problems: list[str]) -> None:
    assert list(wrong(arguments, SCHEMA)) == problems


def test_unknown_arguments_are_refused_unless_the_schema_allows_them() -> None:
    class Loose(Tool):
        name, description, parameters = "loose", "", {"type": "object", "properties": {}}

        async def __call__(self, arguments: Any) -> str:
            return str(arguments)

    class Looser(Loose):
        parameters = {**Loose.parameters, "additionalProperties": True}

    assert refused(Loose(), a=1) == 'there is no argument "a"'
    assert call(Looser(), a=1) == "{'a': 1}"
