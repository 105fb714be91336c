"""The tool ``python``: real programs, what the policy reads of them, and that a play that ends takes them with it."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, cast

import psutil
import pytest

from relax_core.chat import Chat
from relax_core.errors import ConfigError
from relax_core.testing.living import living
from relax_core.types import Text, ToolCall, ToolResult
from relax_envs.sandbox import runner
from relax_envs.sandbox.limits import SandboxError
from relax_envs.tools import ToolFailed, answer
from relax_envs.tools.python import PythonTool

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guards are those of Linux"),
]


class Counting:
    def count_calls(self, n: int) -> None: ...


def made(**settings: Any) -> PythonTool:
    if runner.NEEDED - runner.guarantees():
        settings = {"allow_unsafe": True, **settings}
    return PythonTool(PythonTool.Config(**settings))


def needs(*layers: str) -> None:
    if missing := set(layers) - runner.guarantees():
        pytest.skip(f"this kernel does not offer {', '.join(sorted(missing))}")


async def told(tool: PythonTool, *programs: str, limit: int = 100_000) -> list[str]:
    """What the policy reads of programs that it runs in one reply."""
    calls = [ToolCall("python", {"code": program}) for program in programs]
    message = await answer(calls, [tool], cast("Chat", Counting()), limit=limit, keep="tail")
    texts = [part.parts[0] for part in message.parts if isinstance(part, ToolResult)]
    return [text.text for text in texts if isinstance(text, Text)]


def said(program: str, **settings: Any) -> str:
    (text,) = asyncio.run(told(made(**settings), program))
    return text


# --- what is said -----------------------------------------------------------------------------------------------------


def test_what_is_printed_comes_back() -> None:
    assert said("print(6 * 7)\nprint('北京 👍')") == "42\n北京 👍"
    assert said("import sys\nprint('a')\nprint('b', file=sys.stderr)") == "a\nb"
    assert said("x = 1") == "The program printed nothing."


def test_a_traceback_names_the_program_and_none_of_our_folders() -> None:
    text = said("import json\nprint('before')\ndef f():\n    return json.loads('{')\nf()")
    assert text.startswith(
        'before\nTraceback (most recent call last):\n  File "program.py", line 5, in <module>\n    f()'
    )
    assert 'File "program.py", line 4, in f' in text and 'File "json/decoder.py"' in text
    assert text.endswith(
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n[exit code 1]"
    )
    assert "launcher" not in text and "relax" not in text and sys.prefix not in text


def test_a_program_that_does_not_compile_is_shown_its_line() -> None:
    text = said("x = (1,\nprint(x")
    assert text.startswith('  File "program.py", line') and "SyntaxError" in text and "launcher" not in text


def test_a_traceback_that_a_program_prints_itself_has_no_folders_either() -> None:
    text = said("import traceback, warnings\nwarnings.warn('old')\ntraceback.print_stack()")
    assert "program.py:2: UserWarning: old" in text and "/" not in text


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import sys\nprint('a')\nsys.exit(3)", "a\n[exit code 3]"),
        ("import os\nprint('a', flush=True)\nos.abort()", "a\n[killed by signal 6]"),
        ("print('a', flush=True)\nwhile True: pass", "a\n[stopped after 0.5 seconds]"),
        ("import time\nprint('a', flush=True)\ntime.sleep(30)", "a\n[stopped after 0.5 seconds]"),
        ("x = bytearray(1 << 30)", "MemoryError\n[out of memory: 256 MB are allowed]"),
        ("while True: print('x' * 1000)", "x\n[stopped: more than 8 KB of output, or too many files or threads]"),
        (
            "import sys\nwhile True: sys.stderr.write('x')",
            "x\n[stopped: more than 8 KB of output, or too many files or threads]",
        ),
    ],
)
def test_how_it_ended_is_said(program: str, end: str) -> None:
    assert said(program, seconds=0.5, memory_mb=256, output_kb=8).endswith(end)


def test_a_flood_is_read_up_to_the_limit_of_the_conversation() -> None:
    (text,) = asyncio.run(told(made(output_kb=100), "while True: print('x' * 99)", limit=200))
    assert (
        text.startswith("[10") and " characters left out]\n" in text and text.endswith("threads]") and len(text) < 250
    )


# --- what it may not --------------------------------------------------------------------------------------------------


def test_the_network_is_refused() -> None:
    needs("network")
    assert "PermissionError" in said("import socket\nsocket.create_connection(('127.0.0.1', 9))")


def test_files_and_processes_of_others_are_refused() -> None:
    needs("files", "processes")
    assert "PermissionError" in said("print(open('/etc/passwd').read())")
    assert "PermissionError" in said("open('/tmp/relax-tool-was-here', 'w')")
    assert "PermissionError" in said("import subprocess\nsubprocess.run(['true'])")


def test_nothing_is_kept_from_one_call_to_the_next() -> None:
    write, read = "open('a.txt', 'w').write('x')\nprint('ok')", "import os\nprint(os.listdir())"
    tool = made()
    assert asyncio.run(told(tool, write)) == ["ok"]
    assert asyncio.run(told(tool, read)) == ["['program.py']"]


def test_a_program_that_is_too_long_is_not_run() -> None:
    assert said("#" * 11, longest=10) == "The program has 11 characters; 10 are allowed."


def test_other_arguments_are_refused() -> None:
    async def call(arguments: Any) -> Any:
        message = await answer([ToolCall("python", arguments)], [made()], cast("Chat", Counting()), limit=1000)
        return message.parts[0].parts[0].text  # type: ignore[union-attr]

    assert asyncio.run(call({})) == 'Tool call 1 was not run: python: "code" is missing.'
    assert asyncio.run(call({"code": 3})) == 'Tool call 1 was not run: python: "code" must be a string.'


# --- many, and the end of a play --------------------------------------------------------------------------------------


def running() -> list[psutil.Process]:
    return living("launcher.py")


def test_no_more_run_at_once_than_allowed() -> None:
    tool = made(concurrency=2)
    most = 0

    async def main() -> list[str]:
        nonlocal most
        going = asyncio.create_task(told(tool, *(f"import time\ntime.sleep(0.3)\nprint({i})" for i in range(5))))
        while not going.done():
            most = max(most, len(running()))
            await asyncio.sleep(0.02)
        return await going

    assert asyncio.run(main()) == ["0", "1", "2", "3", "4"]
    assert most == 2


def test_a_play_that_is_cancelled_kills_its_program() -> None:
    tool = made(seconds=50.0, concurrency=1)

    async def main() -> list[str]:
        going = asyncio.create_task(told(tool, "import time\ntime.sleep(50)"))
        while not running():
            await asyncio.sleep(0.01)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        begun = time.monotonic()
        while running():
            await asyncio.sleep(0.01)
        assert time.monotonic() - begun < 20
        return await told(tool, "print('next')")  # its place is free again

    assert asyncio.run(main()) == ["next"]


def test_a_sandbox_that_does_not_work_fails_the_play(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = made()

    def broken(*args: Any, **settings: Any) -> Any:
        raise SandboxError("sandbox: out of processes")

    monkeypatch.setattr(runner, "run", broken)
    with pytest.raises(ToolFailed, match="tool python: SandboxError: sandbox: out of processes"):
        asyncio.run(told(tool, "print(1)"))


def test_a_system_without_guards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "guarantees", lambda: frozenset({"time", "memory"}))
    with pytest.raises(ConfigError, match="tool python: this system cannot enforce files, network, processes"):
        PythonTool(PythonTool.Config())
    PythonTool(PythonTool.Config(allow_unsafe=True))
