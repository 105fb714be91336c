"""Tool ``python``: runs a program in the sandbox, and gives back what it printed and how it ended."""

from __future__ import annotations

import asyncio
import re
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from relax_core.interfaces import ComponentConfig
from relax_envs.rewards.loops import PerLoop
from relax_envs.sandbox import runner
from relax_envs.sandbox.limits import Limits, Outcome
from relax_envs.threads import stoppable
from relax_envs.tools.tool import Tool, ToolError


class PythonTool(Tool):
    """Each call is a process of its own, without network, other processes, or files but those that it writes; nothing
    of it is left afterwards. docs/sandbox.md says what holds on which system. A play that ends kills its programs.

    Raises ConfigError where this system cannot guard programs, unless ``allow_unsafe``.
    """

    class Config(ComponentConfig):
        id: Literal["python"] = "python"
        seconds: Annotated[float, Field(gt=0)] = 6.0
        """For a program, by the clock."""
        memory_mb: Annotated[int, Field(ge=64)] = 1024
        """Address space of its process, Python included."""
        output_kb: PositiveInt = 1024
        """What it may print before it is stopped; ``output_limit`` says how much of it the policy reads."""
        longest: PositiveInt = 100_000
        """Characters of a program; a longer one is not run."""
        concurrency: PositiveInt = 2
        """Programs that run at the same time; further calls wait."""
        allow_unsafe: bool = False
        """Run programs also where this system cannot keep them off the network, the files and the processes."""

    name = "python"

    def __init__(self, config: Config) -> None:
        if not config.allow_unsafe:
            runner.refuse_unsafe("tool python", "use another machine")
        self.config = config
        self.description = (
            "Runs a Python program and gives back what it prints. Every call starts anew: nothing is kept from one to "
            f"the next. A program has {config.seconds:g} seconds and {config.memory_mb} MB, and no network."
        )
        self.parameters = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The whole program."}},
            "required": ["code"],
        }
        self._limits = Limits(
            seconds=config.seconds, memory_bytes=config.memory_mb << 20, output_bytes=config.output_kb << 10
        )
        self._places: PerLoop[asyncio.Semaphore] = PerLoop(lambda: asyncio.Semaphore(config.concurrency))

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Raises SandboxError when the sandbox does not work, which is no fault of the program."""
        code = arguments["code"]
        if len(code) > self.config.longest:
            raise ToolError(f"The program has {len(code):,} characters; {self.config.longest:,} are allowed.")
        places = self._places.get()
        await places.acquire()

        def run(stop: threading.Event) -> Outcome:
            return runner.run(code, limits=self._limits, stop=stop)

        return self._told(await stoppable(run, "tool python", places.release))

    def _told(self, outcome: Outcome) -> str:
        printed = outcome.stdout.decode(errors="replace").rstrip()
        errors = without_paths(outcome.stderr.decode(errors="replace")).rstrip()
        said = [text for text in (printed, errors, self._end(outcome)) if text]
        return "\n".join(said) or "The program printed nothing."

    def _end(self, outcome: Outcome) -> str:
        """How it ended, where what it printed does not say so."""
        config = self.config
        if outcome.how == "timeout":
            return f"[stopped after {config.seconds:g} seconds]"
        if outcome.how == "memory":
            return f"[out of memory: {config.memory_mb} MB are allowed]"
        if outcome.how == "flood":
            return f"[stopped: more than {config.output_kb} KB of output, or too many files or threads]"
        if outcome.how == "killed":
            return f"[killed by signal {-outcome.code}]"
        return f"[exit code {outcome.code}]" if outcome.code else ""


def without_paths(text: str) -> str:
    """A traceback without the folders of this machine: ``program.py`` and ``json/decoder.py``."""
    folders = {*sysconfig.get_paths().values(), str(Path(runner.__file__).parent)}
    begin = "|".join(re.escape(f"{folder}/") for folder in sorted(folders, key=len, reverse=True))
    return re.sub(rf"(?:{begin}|/[^\s\"':]*/relax-sandbox-[^/\s\"']+/)", "", text)
