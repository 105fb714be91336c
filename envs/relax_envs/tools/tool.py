"""What a tool is: an object with a name, a schema of what it takes, and a call; or a function made into one."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

from relax_core.errors import ConfigError, RelaxError
from relax_core.types import Audio, Image, Part, Text, ToolSpec, Video
from relax_envs.named import is_async
from relax_envs.threads import in_thread
from relax_envs.tools.parameters import Parameters, in_words, wrong

Output = str | Part | Sequence[str | Part] | None
"""What a call gives back: text, Image, Audio, Video, several of them in order, or nothing."""

NOTHING = "The tool returned nothing."


class ToolError(RelaxError):
    """What a tool raises to tell the policy that its call was no good: the text is the call's result."""


class ToolFailed(RelaxError):
    """A tool that does not work: an error of the play, which is no fault of the policy."""


class Tool(ABC):
    """Something that a policy can call in the middle of a play. One object may serve many calls at once."""

    name: str
    """What the policy calls it by."""
    description: str
    """What it does, for the policy."""
    parameters: Mapping[str, Any]
    """The JSON schema of an object: what it takes."""

    @abstractmethod
    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        """Do it. ``arguments``: what ``read`` made of those of the call.

        Raises ToolError for what the policy should hear; anything else that is raised fails the play. When the play
        ends the call is cancelled.
        """

    def read(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call, checked: by ``parameters``, unless it is overridden.

        Of JSON Schema it knows types, enumerations, bounds, required properties, items and alternatives. Properties
        that ``parameters`` does not name are refused unless it says ``additionalProperties``. Raises ToolError.
        """
        if problems := list(wrong(arguments, {"additionalProperties": False, **self.parameters})):
            raise ToolError(in_words(problems))
        return arguments

    @property
    def spec(self) -> ToolSpec:
        """What declares it to the policy."""
        return ToolSpec(self.name, self.description, self.parameters)


class FunctionTool(Tool):
    """A function as a tool: what it takes is said by its annotations, what it does by its docstring.

    Arguments are read by pydantic as strict JSON: a number in quotes is no number, an unknown argument is refused. A
    function that blocks runs in a thread; that goes on to its end although the play may have ended before.
    Numbers, dicts and lists of them are given back as JSON. Raises ConfigError for a function whose parameters do not
    say what they take.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, description: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", ""))
        if not self.name:
            raise ConfigError(f"tool: {function!r} has no name: give it one: function_tool(f, name=...)")
        self.description = inspect.getdoc(function) or "" if description is None else description
        self._parameters = Parameters(function, f"tool {self.name}")
        self.parameters = self._parameters.schema
        self._async = is_async(function)

    def read(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._parameters.read(arguments)
        except ValueError as error:
            raise ToolError(str(error)) from error

    async def __call__(self, arguments: Mapping[str, Any]) -> Output:
        call = partial(self.function, **arguments)
        found = await call() if self._async else await in_thread(call, f"tool {self.name}")
        output: Output = _as_output(await found if inspect.isawaitable(found) else found)
        return output


@overload
def function_tool(
    function: Callable[..., Any], /, *, name: str | None = ..., description: str | None = ...
) -> FunctionTool: ...
@overload
def function_tool(
    *, name: str | None = ..., description: str | None = ...
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def function_tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """A tool that calls ``function``: see FunctionTool. As a decorator: ``@tool``, or ``@tool(name="look")``."""
    if function is None:
        return partial(FunctionTool, name=name, description=description)
    return FunctionTool(function, name, description)


tool = function_tool


def parts_of(output: Output) -> tuple[Text | Image | Audio | Video, ...]:
    """What a tool gave back, as parts of a message; nothing is said in words. Raises TypeError for anything else."""
    several = [output] if isinstance(output, str | Part) else [] if output is None else output
    if not isinstance(several, Sequence):
        raise TypeError(f"it gave back a {type(output).__name__}; {_ALLOWED}")
    found: list[Text | Image | Audio | Video] = []
    for one in several:
        part = Text(one) if isinstance(one, str) else one
        if not isinstance(part, Text | Image | Audio | Video):
            raise TypeError(f"it gave back a {type(one).__name__}; {_ALLOWED}")
        if part != Text(""):
            found.append(part)
    return tuple(found) or (Text(NOTHING),)


_ALLOWED = "text, Image, Audio, Video (relax_core.types), a list of these, or None is allowed"


def _as_output(value: Any) -> Any:
    """JSON values become text; lists of parts stay."""
    listed = isinstance(value, list | tuple) and all(isinstance(one, str | Part) for one in value)
    if listed or not isinstance(value, bool | int | float | dict | list | tuple):
        return value
    return json.dumps(value, ensure_ascii=False)
