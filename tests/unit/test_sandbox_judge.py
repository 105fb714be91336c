"""Program and judge, two processes: what they can do, how their ends are told apart, that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_envs.sandbox.limits import END, Limits, Outcome
from relax_envs.sandbox.names import Names, names_in
from relax_envs.sandbox.runner import guarantees, run
from tests.unit.killed_parent import check_nothing_is_left

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guards are those of Linux"),
]

SHORT = Limits(seconds=0.7)
ONE = "def f(): return 1"


def judged(program: str, *texts: str, **settings: Any) -> Outcome:
    return run(program, tests=[{"text": text, "theirs": [], "ours": {}} for text in texts], **settings)


def processes() -> set[int]:
    """Of the sandbox, also dead ones of which nobody has heard."""
    found = set()
    for one in psutil.process_iter(["pid", "cmdline", "ppid", "status"]):
        mine = one.info["ppid"] == os.getpid() and one.info["status"] == psutil.STATUS_ZOMBIE
        if mine or any(part.endswith("sandbox/launcher.py") for part in one.info["cmdline"] or []):
            found.add(one.info["pid"])
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of processes, of open files and of folders."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    folder = Path(tempfile.mkdtemp(dir=memory))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    guarantees()
    before, files = processes(), len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == files
    end = time.monotonic() + 10
    while processes() - before and time.monotonic() < end:  # others run the sandbox, too
        time.sleep(0.05)
    assert not processes() - before
    folder.rmdir()  # empty


def test_each_test_has_a_verdict_and_a_namespace() -> None:
    found = judged(ONE, "x = f()\nassert x == 1", "assert 'x' not in globals() and f() == 2", "g()", "assert f()")
    assert found.verdicts == ("passed", "wrong", "failed", "passed", END) and found.how == "ended"
    assert set(found.guards) == guarantees()


@pytest.mark.parametrize(
    ("program", "verdicts", "how"),
    [
        ("def f():\n    import os; os._exit(3)", ("passed", 3, END), "ended"),
        ("def f():\n    import os; os._exit(0)", ("passed", 0, END), "ended"),
        ("def f():\n    import os; os.abort()", ("passed", -signal.SIGABRT, END), "ended"),
        ("def f():\n    import os; os.closerange(3, 64)", ("passed", 1, END), "ended"),
        ("def f():\n    while True: pass", ("passed",), "timeout"),
        ("def f():\n    import sys\n    while True: sys.stderr.write('x' * 999)", ("passed",), "flood"),
        ("def f(): return [0] * 10**10", ("passed", "memory", "passed", END), "ended"),
        ("def f(): raise AssertionError", ("passed", "failed", "passed", END), "ended"),
        ("def f(): return 'x' * (33 << 20)", ("passed", "flood", END), "ended"),
        ("import os; os._exit(0)", (0, END), "ended"),
        ("x = [0] * 10**10", (1, END), "ended"),
        ("syntax error", (1, END), "ended"),
    ],
)
def test_how_a_program_ends_is_told_apart(program: str, verdicts: tuple[Any, ...], how: str) -> None:
    found = judged(program, "pass", "f()", "pass", limits=SHORT)
    assert (found.verdicts, found.how) == (verdicts, how), found.stderr


def test_after_a_program_is_gone_nothing_passes() -> None:
    found = judged("import os\ndef f(): os._exit(0)", "try:\n    f()\nexcept BaseException:\n    pass", "pass")
    assert found.verdicts == (0, END)


@pytest.mark.parametrize(
    "program",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n" + ONE,
        "import atexit, time\natexit.register(time.sleep, 60)\n" + ONE,
        "import signal\nfor n in (1, 2, 13, 15): signal.signal(n, signal.SIG_IGN)\n" + ONE,
        "import os, gc, time\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Served')\n"
        "receive = peer.receive\ndef wait():\n    try: return receive()\n    except EOFError: time.sleep(60)\n"
        "peer.receive = wait\n" + ONE,
    ],
)
def test_a_program_that_would_stay_does_not(program: str) -> None:
    start = time.monotonic()
    found = judged(program, "assert f() == 1", limits=Limits(seconds=30))
    assert found.verdicts == ("passed", END) and time.monotonic() - start < 20


def test_what_nobody_waits_for_is_ended() -> None:
    stop = threading.Event()
    threading.Timer(2, stop.set).start()
    found = judged("import time\ndef f(): time.sleep(60)", "f()", stop=stop, limits=Limits(seconds=60))
    assert found.how == "killed" and found.verdicts == ()


def test_the_tests_are_under_the_same_guards() -> None:
    if not {"files", "network", "processes"} <= guarantees():
        pytest.skip("this kernel does not offer them")
    texts = (
        "open('/etc/passwd')",
        "import socket; socket.socket()",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.listdir('../program')",
        "import resource\nassert resource.getrlimit(resource.RLIMIT_AS)[0] > 0\nopen('here', 'w').write('x')",
    )
    assert judged(ONE, *texts).verdicts == ("failed",) * 5 + ("passed", END)


def test_a_loop_of_the_tests_is_ended() -> None:
    assert judged("def f():\n    while True: yield 1", "list(f())", limits=SHORT).how in ("timeout", "failed")
    assert judged(ONE, "while True: pass", limits=SHORT).how == "timeout"


def test_many_objects_are_forgotten_when_the_tests_forget_them() -> None:
    program = (
        "class C:\n    def __init__(self): self.x = bytearray(10**6)\n    def m(self): return 1\ndef f(): return C()"
    )
    text = "for i in range(2000):\n    c = f()\n    assert c.m() == 1 and isinstance(c, C)"
    assert judged(program, text, limits=Limits(seconds=30, memory_bytes=400 << 20)).verdicts == ("passed", END)


def test_a_killed_parent_takes_both_with_it() -> None:
    if "parent" not in guarantees():
        pytest.skip("this kernel does not offer it")
    tests = json.dumps([{"text": "f()", "theirs": [], "ours": {}}])
    code = (
        "import json\nfrom relax_envs.sandbox.runner import *\n"
        f"run('def f():\\n    while True: pass', tests=json.loads({tests!r}), limits=Limits(seconds=60))"
    )
    check_nothing_is_left(code, processes=2)


@pytest.mark.parametrize(
    ("text", "function", "theirs", "ours"),
    [
        ("assert f(x) == 1", None, (), {}),
        ("assert set(f(1)) == {1}", None, (), {}),
        ("assert sum([1]) == 1", None, ("sum",), {}),
        ("assert set(sum([1])) == set()", "sum", ("sum",), {}),
        ("assert isclose(1, 1)", None, ("isclose",), {}),
        ("assert isclose(f(1), 1)", None, (), {"isclose": ("math", "isclose")}),
        ("assert isclose(1, 1) and Counter()", None, ("Counter", "isclose"), {}),
        ("assert math.isclose(f(1), 1)", None, (), {"math": ("math", "")}),
        ("import math\nassert math.isclose(f(1), 1)", None, (), {}),
        ("assert np.allclose(f(1), 1)", None, (), {"np": ("numpy", "")}),
        ("assert bisect([1], 1) == 1", None, (), {}),
        ("assert string.x(1) == 1", "string", ("string",), {}),
        ("def g(set): return set\nassert all(g(f(x)) for x in [1])", None, (), {}),
        ("from solution import f\nassert f()", None, (), {}),
        ("def check(candidate):\n    assert len(candidate(1)) == 1\ncheck(f)", "f", ("f",), {}),
    ],
)
def test_whose_a_name_is(text: str, function: str | None, theirs: tuple[str, ...], ours: dict[str, Any]) -> None:
    assert names_in(text, function) == Names(theirs, ours)


@pytest.mark.parametrize("text", ["assert True", "assert set(sum([1])) == {1}", "import math\nassert math.pi > 3"])
def test_tests_that_name_nothing_of_the_program_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give its function as 'entry_point'"):
        names_in(text, None)
