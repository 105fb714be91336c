"""The environment ``agent``: each play is a command, a program that knows nothing of Relax, on tasks from data sets."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt

from relax_core.guard import NO_START
from relax_core.types import Task
from relax_envs.agent import program
from relax_envs.agent.environment import AgentConfig, AgentEnvironment
from relax_envs.agent.errors import AgentDeadline, AgentExit
from relax_envs.agent.task_file import read_result, write_task
from relax_envs.data.environment import RowsEnvironment

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_envs.agent.session import Session

INHERITED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


class Agent(RowsEnvironment, AgentEnvironment):
    """Starts the command once for each play, and kills all that it started at the end of it. See docs/agents.md.

    Data sets are those of ``single_turn``.
    """

    class Config(RowsEnvironment.Config, AgentConfig):
        command: Annotated[tuple[str, ...], Field(min_length=1)]
        """The program and its arguments; no shell. ``{python}``, ``{base_url}``, ``{key}``, ``{task}``, ``{result}``
        and ``{folder}`` in them are replaced."""
        cwd: Path | None = None
        """Where it runs; default: a folder of the play, which is removed afterwards."""
        env: Mapping[str, str] = Field(default_factory=dict)
        """More environment variables of it."""
        inherit: tuple[str, ...] = INHERITED
        """Environment variables that it gets from this process, where they are set. Keep keys and tokens out."""
        deadline: Annotated[float, Field(gt=0)] = 1800.0
        """Seconds by the clock until it is killed and the play is an error, waiting for replies included."""
        output_limit: NonNegativeInt = 2000
        """Characters of its standard error, the last ones, that are part of an error."""
        need_answer: bool = False
        """Whether a row without an answer is bad."""

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        yield from super().check(config, run)
        if config.cwd is not None and not config.cwd.is_dir():
            yield f"cwd: {config.cwd} is no folder; it is one on the machine that plays"
        name = config.command[0]
        if "{" not in name and "/" not in name and shutil.which(name) is None:
            yield f"command: no program {name!r} on PATH; give its path, or {{python}} for the Python that runs this"

    async def run_agent(self, task: Task, session: Session) -> str | None:
        config = self.config
        with tempfile.TemporaryDirectory(prefix="relax-agent-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            task_path = await asyncio.to_thread(write_task, task, folder, session.chat.dump)
            places = {
                "python": sys.executable,
                "base_url": session.base_url,
                "key": session.key,
                "task": str(task_path),
                "result": str(folder / "result.json"),
                "folder": name,
            }
            ended = await program.run(
                [_filled(argument, places) for argument in config.command],
                cwd=config.cwd or folder,
                env=self._environment(places),
                deadline_s=config.deadline,
                most_said=config.output_limit,
            )
            said = f"; standard error ends with:\n{ended.said}" if ended.said else ""
            if ended.code is None:
                raise AgentDeadline(f"the agent was still running after {config.deadline:g} s{said}")
            if ended.code == NO_START:
                raise AgentExit(f"the agent could not be started{said}")
            if ended.code:
                raise AgentExit(f"the agent ended with exit code {ended.code}{said}")
            result = read_result(folder / "result.json")
        session.chat.metrics.update(result.metrics)
        return result.answer

    def _environment(self, places: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in self.config.inherit if name in os.environ}
        local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}  # a proxy does not reach the loopback
        own = {
            "OPENAI_BASE_URL": places["base_url"],
            "OPENAI_API_KEY": places["key"],
            "RELAX_TASK": places["task"],
            "RELAX_RESULT": places["result"],
        }
        return {**local, **inherited, **self.config.env, **own}


def _filled(argument: str, places: Mapping[str, str]) -> str:
    """Other braces are left alone."""
    for name, value in places.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument
