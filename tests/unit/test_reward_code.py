"""Reward ``code``: programs in replies, tests in all their forms, and verdicts that cannot be had for nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import pytest

from relax_core.errors import ConfigError, DataError
from relax_core.testing.reward_plays import group_of, played, rewarded
from relax_envs.rewards import code
from relax_envs.rewards.code import Code, program_of
from relax_envs.sandbox import runner
from relax_envs.sandbox.limits import SandboxError
from relax_envs.sandbox.task_tests import Assertions, CallTest, StandardIO, read_tests

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are kept off the network on Linux alone"),
]

ADD = [{"input": "1 2", "output": "3"}, {"input": "5 5\n", "output": "10\n"}]
GOOD = "a, b = map(int, input().split())\nprint(a + b)"
CALLS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'\nassert add(1.5, 1) == 2.5"
PLUS = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a, b): return a + b"


def reply(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


def score(program: str, tests: Any, metadata: dict[str, Any] | None = None, **settings: Any) -> Any:
    return rewarded(Code, played(reply(program), answer=tests, metadata=metadata), **settings)


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```py\nx\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("```python\nold\n```\nbetter:\n```python\nnew\n```", "new\n"),
        ("```python\nx\n```\nIt prints\n```\n3\n```", "x\n"),
        ("```python\nx\n```\n```bash\nls\n```", "x\n"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"),
        ("  ```python\nx\n  ```", "x\n"),
        ("```python title=a\nx\n```", "x\n"),
        ("print(1)", None),
        ("```python\nnever ends", None),
        ("<think>```python\nno\n```", None),
        ("```bash\nls\n```", "ls\n"),
        ("```bash\nls\n```\n```\nx\n```", "x\n"),
        ("```Python3.11\nx\n```", "x\n"),
        ("```{.python}\nx\n```", "x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("````python\n```\n````", "```\n"),
        ("1. Code:\n\n   ```python\n   if x:\n       y\n\n   z\n   ```", "if x:\n    y\n\nz\n"),
        ("- ```python\n  x\n  ```", "x\n"),
        ("```python\r\nx\r\n```\r\n", "x\n"),
        ("```python\nx\n```<|im_end|>", "x\n"),
        ("", None),
    ],
)
def test_the_program_of_a_reply(text: str, program: str | None) -> None:
    assert program_of(text) == program


def test_a_bare_reply_may_be_a_program() -> None:
    assert program_of("print(1)", fenced=False) == "print(1)"
    assert rewarded(Code, played(GOOD, answer=ADD)) == 0.0
    assert rewarded(Code, played(GOOD, answer=ADD), fenced=False) == 1.0


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (ADD, [StandardIO] * 2),
        (json.dumps(ADD), [StandardIO] * 2),
        ({"inputs": ["1 2"], "outputs": ["3"]}, [StandardIO]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [StandardIO]),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, [CallTest]),
        ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, [CallTest]),
        (CALLS, [Assertions] * 3),
        (CALLS.splitlines(), [Assertions] * 3),
        ({"test_list": CALLS.splitlines()}, [Assertions] * 3),
        ("assert 3 == add(1, 2)", [Assertions]),
        ("assert add(1, 2) == sum([1, 2])", [Assertions]),
        ([{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}], [CallTest]),
        ({"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import math"}, [Assertions]),
        ({"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "test_imports": []}, [Assertions]),
        ("assert not add(0, 0)", [Assertions]),
        ("x = 1\nassert add(x, 2) == 3", [Assertions]),
        ("for i in range(3):\n    assert add(i, 1) == i + 1", [Assertions]),
    ],
)
def test_forms_of_tests(given: Any, kinds: list[type]) -> None:
    assert [type(test) for test in read_tests(given)] == kinds


def test_check_functions() -> None:
    text = (
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n"
        "    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
    )
    found = read_tests(text, "add")
    assert [type(t) for t in found] == [Assertions, Assertions]
    assert score(PLUS, text, {"entry_point": "add"}) == 1.0
    assert score(PLUS.replace("+", "-"), text, {"entry_point": "add"}) == 0.0
    longer = text + "    for i in range(5):\n        assert candidate(i, i) == 2 * i\n"
    assert score(PLUS, longer, {"entry_point": "add"}) == 1.0
    assert score(PLUS.replace("+", "-"), longer, {"entry_point": "add"}) == 0.0


@pytest.mark.parametrize(
    "given",
    [
        None,
        3,
        [],
        {},
        "",
        "x = 1",
        "assert",
        "[1, 2",
        {"inputs": [1], "outputs": []},
        [{"input": "x"}],
        [{"input": "x", "output": None}],
        [{"input": "[1]", "output": "1", "testtype": "functional"}],
        {"inputs": [[1]], "outputs": [1], "fn_name": "not a name"},
        [1, 2],
        "def check(c):\n assert c",
        "assert True",
        "return\nassert f()",
        "def g():\n    assert f()",
        "class TestF:\n    def test_f(self):\n        assert f()",
        "def test_f(x):\n    assert f(x)",
    ],
)
def test_tests_that_cannot_be_read_are_an_error_of_the_row(given: Any) -> None:
    with pytest.raises(DataError, match=r"task 't': answer: .*: fix the row"):
        score(GOOD, given)


def test_tests_may_stand_in_the_metadata() -> None:
    assert rewarded(Code, played(reply(PLUS), metadata={"cases": CALLS}), tests="cases") == 1.0
    with pytest.raises(DataError, match="cases"):
        rewarded(Code, played(reply(PLUS), answer=CALLS), tests="cases")


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (GOOD, ADD, 1),
        (GOOD + "\nprint()", ADD, 1),
        (GOOD.replace("+", "-"), ADD, 0),
        ("print(3)", ADD, 0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='')", ADD, 1),
        (f"def main():\n    {GOOD.splitlines()[0]}\n    print(a + b)\nif __name__ == '__main__':\n    main()", ADD, 1),
        ("print('1  ')\nprint('2')", [{"input": "", "output": "1\n2"}], 1),
        ("print('1 2')", [{"input": "", "output": "1\n2"}], 0),
        (PLUS, CALLS, 1),
        ("def add(a, b): return b + a", CALLS, 0),
        ("", CALLS, 0),
        ("def f(): return (1, 2)", "assert f() == (1, 2)", 1),
        ("def f(): return [1, 2]", "assert f() == (1, 2)", 0),
        ("def f(): return {2, 1}", "assert f() == {1, 2}", 1),
        ("def f(): return {'b': [1.0], 'a': None}", "assert f() == {'a': None, 'b': [1]}", 1),
        ("def f(): return True", "assert f() == 1", 1),
        ("from collections import *\ndef f(): return Counter('aab')", "assert f() == {'a': 2, 'b': 1}", 1),
        ("from collections import *\nf = namedtuple('P', 'x y')", "assert f(1, 2) == (1, 2)", 1),
        ("def f(n): return 7 ** n", f"assert f(400) == {7**400}", 1),
        ("def f(n): return 7 ** n + 1", f"assert f(400) == {7**400}", 0),
        ("def f(): return 8", "assert f() == 2 ** 3", 1),
        ("def f(): return 9", "assert f() == 2 ** 3", 0),
        ("class P:\n    def __eq__(self, other): return type(other) is P\ndef f(): return P()", "assert f() == P()", 0),
        ("def f(): return 1", "assert f() is True", 0),
        ("def f(): return None", "assert f() is None", 1),
        ("def f(): return {1: 2}", {"inputs": [[]], "outputs": [{"1": 2}], "fn_name": "f"}, 1),
        ("def f(): return list(range(300000))", {"inputs": [[]], "outputs": [[*range(300000)]], "fn_name": "f"}, 1),
        ("def f(): return list(range(300001))", {"inputs": [[]], "outputs": [[*range(300000)]], "fn_name": "f"}, 0),
        ("print('x' * 3000000)", [{"input": "", "output": "x" * 3000000}], 1),
        (f"{PLUS}\nif __name__ == '__main__':\n    print(add(int(input()), 1))", CALLS, 1),
        ("def f(): return 0.1 + 0.2", "assert f() == 0.3", 0),
        ("def f(): return 0.1 + 0.2", "assert abs(f() - 0.3) < 1e-9", 1),
        ("def f(): return [1]", "assert f()", 1),
        ("def f(): return []", "assert f()", 0),
        (PLUS, "from solution import add\ndef test_a(): assert add(1, 2) == 3\ndef test_b(): assert add(1, 1) == 2", 1),
        (PLUS, "from solution import add\ndef test_a(): assert add(1, 2) == 3\ndef test_b(): assert add(1, 1) == 1", 0),
        (PLUS, "def t():\n    assert add(1, 1) == 1\nif __name__ == '__main__':\n    t()", 0),
        (METHOD, {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, 1),
        (PLUS, {"inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"], "fn_name": "add"}, 1),
        (PLUS, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, 1),
        ("def two(): return 1, 2", {"inputs": [[]], "outputs": [[1, 2]], "fn_name": "two"}, 1),
        ("def two(): return 1, 3", {"inputs": [[]], "outputs": [[1, 2]], "fn_name": "two"}, 0),
    ],
)  # fmt: skip
def test_right_and_wrong(program: str, tests: Any, expected: int) -> None:
    assert score(program, tests) == expected


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(99)", "timeout"),
        ("x = [0] * 10**10", "memory"),
        ("while True: print('x' * 999)", "flood"),
        ("raise SystemExit(1)", "failed"),
        ("import os; os.abort()", "killed"),
        ("syntax error", "failed"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "failed"),
        ("import os\nfor i in range(9999): open(str(i), 'w')\nimport time; time.sleep(9)", "flood"),
        ("print(4)", "wrong"),
    ],
)
def test_what_a_program_does_wrong_is_zero_and_named(program: str, how: str) -> None:
    trajectory = played(reply(program), answer=[{"input": "", "output": "3"}])
    assert rewarded(Code, trajectory, seconds=0.3) == 0.0
    assert trajectory.metrics == {"code/passed": 0.0, f"code/{how}": 1.0}


def test_a_part_of_the_tests_may_count() -> None:
    program = "def add(a, b):\n    return a + b if a != 'a' else None"
    trajectory = played(reply(program), answer=CALLS)
    assert rewarded(Code, trajectory) == 0.0 and trajectory.metrics["code/passed"] == pytest.approx(2 / 3)
    assert rewarded(Code, trajectory, partial=True) == pytest.approx(2 / 3)
    assert score(GOOD, [*ADD, {"input": "x", "output": "y"}], partial=True) == pytest.approx(2 / 3)


def test_a_test_that_ends_the_program_costs_itself_alone() -> None:
    program = "import os, time\ndef f(x):\n    if x == 2: os._exit(0)\n    if x == 4: time.sleep(9)\n    return x"
    trajectory = played(reply(program), answer=[f"assert f({x}) == {x}" for x in range(1, 7)])
    assert rewarded(Code, trajectory, partial=True, seconds=1.0) == pytest.approx(4 / 6)
    assert trajectory.metrics["code/failed"] == 1.0
    assert rewarded(Code, trajectory) == 0.0 and trajectory.metrics["code/passed"] == pytest.approx(1 / 6)


def test_each_test_has_its_time() -> None:
    program = "import time\ndef f(x):\n    time.sleep(0.5)\n    return x"
    tests = [f"assert f({x}) == {x}" for x in range(4)]
    assert rewarded(Code, played(reply(program), answer=tests), seconds=1.5) == 1.0
    assert rewarded(Code, played(reply(program), answer=tests), total_seconds=1.5, partial=True) < 1.0


def test_time_for_all_tests_is_bounded() -> None:
    slow = [{"input": "", "output": "1"}] * 20
    trajectory = played(reply("import time; time.sleep(0.2); print(1)"), answer=slow)
    assert rewarded(Code, trajectory, partial=True, total_seconds=0.6) < 0.2
    assert rewarded(Code, trajectory, partial=True, total_seconds=30.0, most_tests=2) == 1.0


def test_all_tests_hang_and_no_time_is_left_is_zero() -> None:
    """The last test begins with next to no time: late, not an error that lets the play abstain."""
    hangs = [{"input": "", "output": "1"}] * 4
    trajectory = played(reply("while True: pass"), answer=hangs)
    assert rewarded(Code, trajectory, partial=True, seconds=0.3, total_seconds=0.61) == 0.0
    assert trajectory.metrics == {"code/passed": 0.0, "code/timeout": 1.0}


@pytest.mark.parametrize(("text", "how"), [("no code", "missing"), (reply(GOOD + "\n#" + "x" * 200), "too_long")])
def test_no_program_or_too_long_a_one_is_wrong(text: str, how: str) -> None:
    trajectory = played(text, answer=ADD)
    assert rewarded(Code, trajectory, longest=100) == 0.0
    assert trajectory.metrics == {"code/passed": 0.0, f"code/{how}": 1.0}


def test_calls_that_fail_are_named() -> None:
    program = "def add(a, b):\n    if a == 1: raise ValueError\n    return [0] * 10**10"
    trajectory = played(reply(program), answer=CALLS)
    assert rewarded(Code, trajectory) == 0.0 and trajectory.metrics["code/failed"] == 1.0
    trajectory = played(reply(program), answer=CALLS.splitlines()[1])
    assert rewarded(Code, trajectory) == 0.0 and trajectory.metrics["code/memory"] == 1.0


def test_nobody_waits_for_what_was_cancelled() -> None:
    async def main() -> float:
        graded = Code(Code.Config())
        start = time.monotonic()
        waiting = asyncio.ensure_future(graded(played(reply("import time; time.sleep(6)"), answer=ADD)))
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.get_running_loop().shutdown_default_executor()
        return time.monotonic() - start

    assert asyncio.run(main()) < 3


def test_failed_plays_abstain() -> None:
    assert rewarded(Code, played(reply(GOOD), answer=ADD, failed=True)) is None


def test_a_sandbox_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **settings: Any) -> Any:
        raise SandboxError("sandbox: out of processes")

    monkeypatch.setattr(code, "run", broken)
    with pytest.raises(SandboxError, match="out of processes"):
        score(GOOD, ADD)


def test_a_system_without_guards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "guarantees", lambda: frozenset({"time", "memory"}))
    with pytest.raises(ConfigError, match="cannot enforce files, network, processes"):
        Code(Code.Config())
    Code(Code.Config(allow_unsafe=True))


async def _group() -> Any:
    plays = [played(reply(program), answer=CALLS) for program in (PLUS, "x", PLUS)]
    return await Code(Code.Config()).score_group(group_of(plays))


def test_a_group_is_scored_together() -> None:
    assert asyncio.run(_group()) == [1.0, 0.0, 1.0]
