"""Reward ``code``: what a program does to pass without being right."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.code import Code

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are kept off the network on Linux alone"),
]


def score(program: str, tests: str, **settings: Any) -> Any:
    return rewarded(Code, played(f"```python\n{program}\n```", answer=tests), **settings)


@pytest.mark.parametrize(
    "program",
    [
        "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
        "class I(int):\n    def __eq__(self, other): return True\ndef add(a, b): return I(7)",
        "class S(str):\n    def __eq__(self, o): return True\n    __repr__ = lambda s: '3'\nadd = lambda a, b: S()",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import builtins\nbuiltins.repr = lambda v: '3'\nbuiltins.type = lambda v: int\ndef add(a, b): return 'x'",
        "def add(a, b): return 0\nimport builtins\nbuiltins.eval = lambda *a: 3\nbuiltins.len = lambda v: 0",
        "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'\"3\"\\n' * 3)\n except OSError: pass\nos._exit(0)",
        "import os\nprint(os.environ.get('RELAX_REPORT'))\ndef add(a, b): return open('harness.py').read()",
        "import gc\nfor o in gc.get_objects():\n if type(o) is list and len(o) == 3: o.clear()\nadd = lambda a, b: 0",
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise SystemExit(0)",
    ],
)
def test_calls_cannot_be_faked_without_the_right_values(program: str) -> None:
    tests = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'\nassert add(20, 22) == 42"
    assert score(program, tests, partial=True) < 0.5


def test_right_values_never_enter_the_child() -> None:
    spy = (
        "import gc\nwanted = str(7130400 + 92)\ndef f():\n"
        "    return sum(wanted in str(o)[:10**6] for o in gc.get_objects() if type(o) in (tuple, list))\n"
    )
    assert score(spy, "assert f() == 7130492") == 0.0
    assert score(spy, "assert f() == 0") == 1.0


LIAR = "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()"


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b): return 0",
        "import os\ndef add(a, b): os._exit(0)",
        LIAR,
        LIAR.replace("class E", "class E(int)"),
        "def add(a, b): return 5\ndef bool(x): return True\nclass AssertionError: pass",
        "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'x' * 16)\n except OSError: pass",
    ],
)
@pytest.mark.parametrize("tests", ["x = 2\nassert add(x, x) == 4", "assert add(2, 2) == 2 + 2"])
def test_plain_ways_around_assertions_fail(program: str, tests: str) -> None:
    assert score(program, tests) == 0.0
