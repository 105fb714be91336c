"""Graders' processes: deadlines, deaths, floods, cancellation, forks, and that no process is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.testing.living import lives, living
from relax_envs.graders.pool import GraderError, Pool

pytestmark = pytest.mark.timeout(60)

MODULE = textwrap.dedent(
    r"""
    import ctypes, os, subprocess, sys, time

    def double(x): return 2 * x
    def hang():
        while True: pass
    def sleep(seconds):
        time.sleep(seconds)
        return seconds
    def leave(status): os._exit(status)
    def crash(): ctypes.string_at(0)
    def stop(): sys.exit(3)
    def fail(text): raise ValueError(text)
    def fill(): return len(bytearray(1 << 40))
    def odd(): return {1, 2}
    def modules(): return sorted(sys.modules)
    def pid(): return os.getpid()
    def child(): return subprocess.Popen(["sleep", "600"]).pid
    def child_then_hang(file):
        with open(file, "w") as out:
            out.write(str(child()))
        hang()
    def flood():
        for _ in range(20000):
            print("x" * 100)
            print("y" * 100, file=sys.stderr)
        os.write(1, b"no reply\n")
        return sys.stdin.read()
    def last_words():
        os.write(2, b"out of luck\n")
        os._exit(7)
    """
)
FUNCTIONS = (
    *("double", "hang", "sleep", "leave", "crash", "stop", "fail", "fill", "odd", "modules", "pid", "child"),
    *("child_then_hang", "flood", "last_words"),
)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pool]]:
    (tmp_path / "some_graders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools: list[Pool] = []

    def build(**settings: Any) -> Pool:
        pools.append(Pool([f"some_graders:{name}" for name in FUNCTIONS], **{"deadline": 10.0, **settings}))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def do(pool: Pool, name: str, *arguments: Any, **settings: Any) -> Any:
    return pool.submit(f"some_graders:{name}", *arguments, **settings).result(30)


def failure(pool: Pool, name: str, *arguments: Any, **settings: Any) -> GraderError:
    with pytest.raises(GraderError) as caught:
        do(pool, name, *arguments, **settings)
    return caught.value


def ended(pid: int) -> bool:
    """Whether a process is gone, or will be within five seconds."""
    for _ in range(100):
        if not lives(pid):
            return True
        time.sleep(0.05)
    return False


def test_results_come_in_order_from_as_many_processes_as_were_asked_for(make: Callable[..., Pool]) -> None:
    pool = make(workers=3)
    assert pool.pids() == []  # none before the first job
    futures = pool.submit_many("some_graders:double", [[i] for i in range(500)])
    assert [f.result(30) for f in futures] == [2 * i for i in range(500)]
    assert 1 <= len(pool.pids()) <= 3
    both = [pool.submit("some_graders:sleep", 0.3) for _ in range(3)]
    begun = time.monotonic()
    assert [f.result(30) for f in both] == [0.3] * 3 and time.monotonic() - begun < 0.9


def test_an_overrun_deadline_kills_one_worker_and_the_other_jobs_go_on(make: Callable[..., Pool]) -> None:
    pool = make(workers=1, deadline=0.5)
    assert do(pool, "double", 1) == 2
    before = pool.pids()
    names = ["double", "hang", "double", "hang", "double"]
    futures = [pool.submit(f"some_graders:{name}", *([1] if name == "double" else [])) for name in names]
    begun = time.monotonic()
    for name, future in zip(names, futures, strict=True):
        if name == "double":
            assert future.result(30) == 2
        else:
            error = future.exception(30)
            assert isinstance(error, GraderError) and error.kind == "deadline"
            assert str(error) == "grader some_graders:hang: it took more than 0.5 s, and was ended"
    assert 1.0 <= time.monotonic() - begun < 5
    assert ended(before[0]) and pool.pids() != before


def test_a_job_may_have_a_deadline_of_its_own_which_begins_with_the_job(make: Callable[..., Pool]) -> None:
    pool = make(workers=1, deadline=0.5)
    slow = pool.submit("some_graders:sleep", 0.8, deadline=5)
    behind = [pool.submit("some_graders:sleep", 0.3) for _ in range(3)]
    assert slow.result(30) == 0.8 and [f.result(30) for f in behind] == [0.3] * 3
    assert failure(pool, "sleep", 5, deadline=0.1).kind == "deadline"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("leave", [3], "its process ended with status 3"),
        ("leave", [0], "its process ended with status 0"),
        ("crash", [], "its process ended by signal SIGSEGV"),
        ("last_words", [], "its process ended with status 7, after: out of luck"),
    ],
)
def test_a_worker_that_dies_fails_its_job_alone(
    make: Callable[..., Pool], name: str, arguments: list[Any], words: str
) -> None:
    pool = make(workers=1)
    before = [pool.submit("some_graders:double", i) for i in range(3)]
    fatal = pool.submit(f"some_graders:{name}", *arguments)
    after = [pool.submit("some_graders:double", i) for i in range(20)]
    assert [f.result(30) for f in before] == [0, 2, 4] and [f.result(30) for f in after] == [2 * i for i in range(20)]
    error = fatal.exception(30)
    assert isinstance(error, GraderError) and error.kind == "died" and words in str(error)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("fail", ["one\nline"], "ValueError: one line"),
        ("fail", ["x" * 10_000], "ValueError: xxx"),
        ("stop", [], "SystemExit: 3"),
        ("odd", [], "TypeError: Object of type set is not JSON serializable"),
        ("double", [], "TypeError: double() missing"),
        ("fill", [], "MemoryError"),
    ],
)
def test_what_a_function_raises_is_told_in_one_line(
    make: Callable[..., Pool], name: str, arguments: list[Any], words: str
) -> None:
    pool = make(workers=1)
    error = failure(pool, name, *arguments)
    assert error.kind == "raised" and words in str(error) and "\n" not in str(error) and len(str(error)) < 700
    assert do(pool, "double", 4) == 8


def test_a_worker_that_was_killed_while_idle_costs_no_job(make: Callable[..., Pool]) -> None:
    pool = make(workers=1)
    for i in range(5):
        assert do(pool, "double", i) == 2 * i
        os.kill(pool.pids()[0], signal.SIGKILL)
    assert do(pool, "double", 7) == 14


def test_what_a_function_prints_or_reads_disturbs_nothing(make: Callable[..., Pool], capfd: Any) -> None:
    pool = make(workers=1)
    assert do(pool, "flood") == "" and do(pool, "double", 4) == 8
    assert capfd.readouterr() == ("", "")


def test_large_arguments_and_results_pass(make: Callable[..., Pool]) -> None:
    pool = make(workers=2)
    texts = [chr(97 + i) * 3_000_000 for i in range(6)]
    futures = pool.submit_many("some_graders:double", [[text] for text in texts])
    assert [f.result(30) for f in futures] == [2 * text for text in texts]
    assert do(pool, "double", "𝟓\ud800\x00\n") == "𝟓\ud800\x00\n" * 2


def test_only_the_functions_that_it_was_made_for_and_only_json(make: Callable[..., Pool]) -> None:
    pool = make()
    with pytest.raises(ValueError, match="is none of this pool's functions"):
        pool.submit("os:system", "touch PWNED")
    with pytest.raises(TypeError):
        pool.submit("some_graders:double", object())
    assert pool.pids() == []


def test_a_function_that_cannot_be_loaded_fails_every_job_with_the_reason(make: Callable[..., Pool]) -> None:
    for name, words in (
        ("some_graders:missing", "AttributeError"),
        ("no_such_module:f", "No module named"),
        ("os:name", "no function"),
    ):
        pool = Pool([name])
        errors = [f.exception(30) for f in pool.submit_many(name, [[], []])]
        assert all(isinstance(e, GraderError) and e.kind == "start" and words in str(e) for e in errors), errors
        pool.close()


def test_a_worker_imports_next_to_nothing(make: Callable[..., Pool]) -> None:
    found = do(make(), "modules")
    assert not {name.partition(".")[0] for name in found} & {"torch", "numpy", "pydantic", "relax_core", "yaml"}


def test_threads_and_event_loops_may_share_it(make: Callable[..., Pool]) -> None:
    pool = make(workers=2)
    found: dict[int, list[Any]] = {}

    def one(number: int) -> None:
        async def calls() -> list[Any]:
            return await pool.run_many("some_graders:double", [[number * 100 + i] for i in range(100)])

        found[number] = asyncio.run(calls())

    threads = [threading.Thread(target=one, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {n: [2 * (n * 100 + i) for i in range(100)] for n in range(8)}


def test_cancelling_leaves_it_sound(make: Callable[..., Pool]) -> None:
    pool = make(workers=1)

    async def cancelled() -> Any:
        tasks = [asyncio.create_task(pool.run("some_graders:sleep", 0.2)) for _ in range(20)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(end, asyncio.CancelledError) for end in ends)
        begun = time.monotonic()
        value = await pool.run("some_graders:double", 21)
        assert time.monotonic() - begun < 3  # jobs that were not sent yet are not done
        return value

    assert asyncio.run(cancelled()) == 42


def test_many_deaths_leave_neither_processes_nor_files_nor_threads(make: Callable[..., Pool]) -> None:
    pool = make(workers=2, deadline=0.2)
    do(pool, "double", 1)
    me = psutil.Process()
    failure(pool, "leave", 1)
    files, threads = me.num_fds(), me.num_threads()
    for _ in range(10):
        failure(pool, "leave", 1)
        failure(pool, "hang")
    do(pool, "double", 1)
    assert me.num_fds() <= files + 3 * 2 and me.num_threads() <= threads + 1  # of a second worker, at most
    assert len(living("some_graders:double")) <= 2


def test_a_killed_job_takes_its_own_children_along(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make(workers=1, deadline=0.5)
    file = tmp_path / "pid"
    assert failure(pool, "child_then_hang", str(file)).kind == "deadline"
    assert ended(int(file.read_text()))


def test_closing_ends_the_workers_and_fails_what_is_left(make: Callable[..., Pool]) -> None:
    pool = make(workers=1)
    pid = do(pool, "pid")
    futures = [pool.submit("some_graders:hang") for _ in range(20)]
    time.sleep(0.1)
    begun = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - begun < 3 and ended(pid)
    assert {f.exception(5).kind for f in futures} == {"closed"}  # type: ignore[union-attr]
    with pytest.raises(GraderError, match="the pool is closed"):
        pool.submit("some_graders:double", 1)


def test_a_pool_that_is_forgotten_ends_its_workers(make: Callable[..., Pool]) -> None:
    pool = Pool(["some_graders:pid"])
    pid = do(pool, "pid")
    del pool
    gc.collect()
    assert ended(pid)


SCRIPT = """
import os, sys, time
sys.path.insert(0, {folder!r})
from relax_core.testing.living import lives, living
from relax_envs.graders.pool import Pool
pool = Pool(["some_graders:pid", "some_graders:hang", "some_graders:double"], workers=1)
print(pool.submit("some_graders:pid").result(30), flush=True)
{rest}
"""


def script(tmp_path: Path, rest: str) -> subprocess.Popen[str]:
    text = SCRIPT.format(folder=str(tmp_path), rest=textwrap.dedent(rest))
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def test_the_workers_end_with_the_interpreter(make: Callable[..., Pool], tmp_path: Path) -> None:
    for rest in ("", "pool.submit('some_graders:hang'); time.sleep(0.2)", "raise SystemExit(1)"):
        with script(tmp_path, rest) as process:
            out, _ = process.communicate(timeout=30)
        assert ended(int(out))


def test_the_workers_end_with_a_killed_parent_even_in_the_middle_of_a_job(
    make: Callable[..., Pool], tmp_path: Path
) -> None:
    with script(tmp_path, "pool.submit('some_graders:hang'); time.sleep(60)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.2)
        process.kill()
        process.wait(10)
    assert ended(pid)


def test_a_fork_starts_workers_of_its_own_and_leaves_the_parents_alone(
    make: Callable[..., Pool], tmp_path: Path
) -> None:
    rest = """
    child = os.fork()
    eight = pool.submit("some_graders:double", 4).result(30)
    print(os.getpid(), pool.submit("some_graders:pid").result(30), eight, flush=True)
    if child:
        os.waitpid(child, 0)
        print(pool.submit("some_graders:pid").result(30), flush=True)
    """
    with script(tmp_path, rest) as process:
        out, _ = process.communicate(timeout=30)
    first, *forked, last = out.split("\n")[:-1]
    pairs = [line.split() for line in forked]
    assert process.returncode == 0 and len(pairs) == 2 and last == first
    assert {pair[2] for pair in pairs} == {"8"} and len({pair[1] for pair in pairs}) == 2
    assert first in {pair[1] for pair in pairs} and all(ended(int(pair[1])) for pair in pairs)
