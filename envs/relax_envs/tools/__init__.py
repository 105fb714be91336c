"""Tools that a policy calls, and environments in which it does. See docs/tools.md."""

from __future__ import annotations

from relax_envs.tools.calling import answer
from relax_envs.tools.environment import ToolEnvironment
from relax_envs.tools.tool import FunctionTool, Output, Tool, ToolError, ToolFailed, function_tool, tool

__all__ = [
    "FunctionTool",
    "Output",
    "Tool",
    "ToolEnvironment",
    "ToolError",
    "ToolFailed",
    "answer",
    "function_tool",
    "tool",
]
