"""Environment ``tool_use``: rows of data sets, played with tools that the run file names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import ComponentConfig
from relax_envs.data.environment import RowsEnvironment
from relax_envs.named import in_words, load
from relax_envs.tools.calling import by_name
from relax_envs.tools.environment import ToolEnvironment
from relax_envs.tools.python import PythonTool
from relax_envs.tools.tool import Tool, function_tool

if TYPE_CHECKING:
    from relax_core.chat import Chat
    from relax_core.types import Task


class FunctionSection(ComponentConfig):
    id: Literal["function"]
    path: str
    """``package.module:name``, or ``path/file.py:name``: a function with annotations and a docstring, a tool, or a
    class of tools, which is made once."""
    name: str | None = None
    """What the policy calls a function by; default: its own name."""
    description: str | None = None
    """What the policy is told of a function; default: its docstring."""
    options: dict[str, Any] = {}
    """Keywords for the class."""


ToolSection = Annotated[PythonTool.Config | FunctionSection, Field(discriminator="id")]


class ToolUse(RowsEnvironment, ToolEnvironment):
    """Reads rows as ``single_turn`` does; all plays share the tools, so that they keep nothing between calls.

    A row that has ``tools`` is played with those of them.
    """

    class Config(ToolEnvironment.Config, RowsEnvironment.Config):
        tools: Annotated[tuple[ToolSection, ...], Field(min_length=1)]
        """Such as ``{id: python, seconds: 5}`` and ``{id: function, path: "package.module:name"}``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._tools = [_made(section) for section in config.tools]
        self._named = by_name(self._tools)

    def tools(self, task: Task, chat: Chat) -> Sequence[Tool]:
        """All, or those that the row names. Raises DataError for one that the run file does not have."""
        row: Sequence[Mapping[str, Any]] | None = task.metadata.get("tools")
        if row is None:
            return self._tools
        names = [one.get("function", one)["name"] for one in row]
        if unknown := [name for name in names if name not in self._named]:
            raise DataError(
                f"task {task.id}: its row asks for the tool {unknown[0]!r}; environments.tools has "
                f"{', '.join(self._named)}: name it there, or take it out of the row"
            )
        return [self._named[name] for name in dict.fromkeys(names)]


def _made(section: PythonTool.Config | FunctionSection) -> Tool:
    """Raises ConfigError."""
    if isinstance(section, PythonTool.Config):
        return PythonTool(section)
    where = "environment tool_use: tools.function.path"
    found: Any = load(section.path, where)
    if inspect.isclass(found) and issubclass(found, Tool):
        try:
            found = found(**section.options)
        except Exception as error:
            raise ConfigError(f"{where}: {section.path!r} cannot be made: {in_words(error)}; see options") from error
    elif section.options:
        raise ConfigError(f"{where}: options are for classes of tools, and {section.path!r} is none")
    if isinstance(found, Tool):
        if section.name or section.description:
            raise ConfigError(f"{where}: {section.path!r} is a tool, which has a name and a description of its own")
        return found
    return function_tool(found, name=section.name, description=section.description)
