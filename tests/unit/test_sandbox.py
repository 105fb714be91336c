"""What a program in the sandbox can use and do, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from relax_envs.sandbox import runner
from relax_envs.sandbox.limits import Limits, SandboxError
from relax_envs.sandbox.runner import guarantees, run
from relax_envs.sandbox.seccomp import DENIED, program
from tests.unit.killed_parent import check_nothing_is_left

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guards are those of Linux"),
]

SHORT = Limits(seconds=0.3)


def needs(*layers: str) -> None:
    missing = set(layers) - guarantees()
    if missing:
        pytest.skip(f"this kernel does not offer {', '.join(sorted(missing))}")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of processes, of open files and of folders."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)  # some disks are slow to remove folders
    folder = Path(tempfile.mkdtemp(dir=memory))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    guarantees()
    before = (len(psutil.Process().children()), len(os.listdir("/proc/self/fd")))
    yield
    assert (len(psutil.Process().children()), len(os.listdir("/proc/self/fd"))) == before
    folder.rmdir()  # empty


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_program_reads_and_writes() -> None:
    found = run("import sys\nprint(sys.stdin.read().upper())\nprint('no', file=sys.stderr)", stdin="äbc".encode())
    assert (found.how, found.code) == ("ended", 0)
    assert found.stdout.decode() == "ÄBC\n" and found.stderr == b"no\n"
    assert set(found.guards) == guarantees() >= {"time", "memory"}


def test_it_is_the_main_module_in_a_folder_of_its_own() -> None:
    text = (
        "import os, sys\nopen('a.txt', 'w').write('x')\nprint(__name__, sorted(os.listdir()), sys.argv == [__file__])"
    )
    assert run(text).stdout == b"__main__ ['a.txt', 'program.py'] True\n"


def test_large_input_and_input_that_nobody_reads() -> None:
    big = b"x" * 3_000_000
    assert run("import sys\nprint(len(sys.stdin.read()))", stdin=big).stdout == b"3000000\n"
    assert run("print('done')", stdin=big).stdout == b"done\n"


def test_nothing_of_our_environment_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert b"hunter2" not in run("import os\nprint(dict(os.environ))").stdout


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("raise ValueError('x')", "failed"),
        ("import sys; sys.exit(3)", "failed"),
        ("this is no Python", "failed"),
        ("x = '\\ud800'; print(x)", "failed"),
        ("def f(): f()\nf()", "failed"),
        ("import os; os.abort()", "killed"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("x = [0] * 10**10", "memory"),
        ("while True: print('x' * 1000)", "flood"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "flood"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(100)", "timeout"),
        ("import sys; sys.stdin.read(); import time; time.sleep(100)", "timeout"),
        (
            "import signal as s, time\nfor n in (2, 15, 24): s.signal(n, s.SIG_IGN)\ntime.sleep(99)",
            "timeout",
        ),
        ("import os\nos.close(1); os.close(2)\nwhile True: pass", "timeout"),
    ],
)
def test_how_a_program_ends(text: str, how: str) -> None:
    start = time.monotonic()
    found = run(text, limits=SHORT)
    assert found.how == how, (found.stdout[-200:], found.stderr[-500:])
    assert time.monotonic() - start < 8 and len(found.stdout) <= SHORT.output_bytes


def test_closed_output_is_no_hang() -> None:
    found = run("import os\nos.close(1); os.close(2)\nimport time; time.sleep(0.2)")
    assert found.how in ("ended", "failed") and found.seconds < 4


def test_many_threads_of_one_program_stay_within_its_memory() -> None:
    text = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    assert run(text, limits=SHORT).how in ("failed", "timeout", "memory")


def test_threads_and_large_libraries_work() -> None:
    text = "from threading import Thread\nt = Thread(target=print, args=('hi',)); t.start(); t.join()\n"
    assert run(text + "import numpy\nprint(numpy.ones(3).sum())", limits=Limits(seconds=20)).stdout == b"hi\n3.0\n"


# --- what it makes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "for i in range(10**6): open(f'f{i}', 'wb').write(b'x' * 10**7)",
        "import os, time\nfor i in range(600): os.mkdir(f'd{i}')\ntime.sleep(9)",
        "import os, time\nwhile True: os.mkdir('d' * 200); os.chdir('d' * 200)",
        "import os, time\nos.mkdir('d', 0o000); os.mkdir('e'); time.sleep(9)" if os.getuid() else "print('x' * 2**21)",
        "import threading as t, time\nt.stack_size(2**15)\n"
        "for i in range(500): t.Thread(target=time.sleep, args=(9,), daemon=True).start()\ntime.sleep(9)",
    ],
)
def test_too_many_files_or_threads_are_a_flood(text: str) -> None:
    found = run(text, limits=Limits(folder_bytes=20 << 20, entries=500))
    assert found.how == "flood" and found.seconds < 5


@pytest.mark.parametrize(
    "text",
    [
        "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')",
        "import os\nfor i in range(60): os.mkdir('d' * 200); os.chdir('d' * 200)",
        "import os\nos.mkdir('a'); open('a/b', 'w'); os.symlink('/', 'a/c'); os.mkdir('a/d', 0o000)",
        "import os\nos.symlink('THERE', 'link'); os.link('program.py', 'again')",
    ],
)
def test_whatever_it_leaves_is_removed(text: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").write_text("kept")
    run(text.replace("THERE", str(there)))
    assert (there / "file").read_text() == "kept"


# --- the sandbox itself -----------------------------------------------------------------------------------------------


def test_a_child_that_cannot_begin_is_a_fault_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_LAUNCHER", Path("/nowhere/launcher.py"))
        with pytest.raises(SandboxError, match=r"could not begin: .*nowhere/launcher\.py"):
            run("print(1)")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="cannot be started"):
        run("print(1)")


def test_programs_run_side_by_side() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: run(f"import time; time.sleep(0.3); print({i})"), range(16)))
    assert [int(one.stdout) for one in found] == list(range(16))


def test_a_killed_parent_takes_its_programs_with_it() -> None:
    """Also one that asks not to be told when its parent dies."""
    needs("parent", "processes")
    texts = ["while True: pass", "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(60)"]
    code = (
        "from concurrent.futures import ThreadPoolExecutor as Pool\nfrom relax_envs.sandbox.runner import *\n"
        f"list(Pool(2).map(lambda text: run(text, limits=Limits(seconds=60)), {texts!r}))"
    )
    check_nothing_is_left(code, processes=2)


def test_the_event_loop_goes_on() -> None:
    async def main() -> int:
        waiting = asyncio.ensure_future(asyncio.to_thread(run, "import time; time.sleep(0.4)"))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(main()) > 10


def test_filters_are_well_formed() -> None:
    """Every jump stays inside, for both machines, and no number is refused twice."""
    for machine in ("x86_64", "aarch64"):
        found = program(machine, 1234)
        assert found[-1][0] == 0x06 and len(found) < 4096
        for i, (code, yes, no, _) in enumerate(found):
            assert code in (0x20, 0x15, 0x45, 0x35, 0x54, 0x06)
            assert code == 0x06 or i + 1 + max(yes, no) < len(found)
    for column in (0, 1):
        numbers = [n[column] for n in DENIED.values() if n[column] >= 0]
        assert len(numbers) == len(set(numbers))


def test_a_run_that_nobody_waits_for_is_ended() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    found = run("import time; time.sleep(60)", stop=stop)
    assert found.how == "killed" and found.seconds < 5


def test_time_to_start_is_not_the_programs() -> None:
    """However little time is left, the program begins: it is late, not the sandbox broken."""
    assert run("import time; time.sleep(5)", limits=Limits(seconds=0.001)).how == "timeout"


def test_many_runs_leave_nothing() -> None:
    """Open files, processes and folders are looked at by every test; here, memory maps of the threads as well."""
    texts = ["print(1)", "1/0", "import os; os.abort()", "open('x', 'w').write('x' * 10**5)", "import os; os.fork()"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, texts * 6))
    assert [one.how for one in found] == ["ended", "failed", "killed", "ended", "failed"] * 6


def test_guarantees_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = guarantees()
    monkeypatch.setattr(runner, "run", None)
    assert guarantees() == first
