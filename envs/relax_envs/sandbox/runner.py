"""Runs a Python program in a child process with limits, and says how it ended.

The child takes its rights away itself before the program begins (``launcher``, ``seccomp``, ``landlock``); this side
starts it and cleans up behind it, ``watch`` holds the clock. See docs/sandbox.md.
"""

from __future__ import annotations

import json
import marshal
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from relax_core.errors import ConfigError
from relax_envs.sandbox.folder import remove
from relax_envs.sandbox.limits import Limits, Outcome, SandboxError
from relax_envs.sandbox.watch import Watch

_LAUNCHER = Path(__file__).with_name("launcher.py")
NEEDED = frozenset({"time", "memory", "network", "files", "processes"})
"""Layers without which a program of a policy is not run."""


def run(
    program: str,
    *,
    stdin: bytes = b"",
    tests: Sequence[Mapping[str, object]] | None = None,
    limits: Limits | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run a program and wait for its end. From any thread; several at once.

    ``tests``: what a judge runs in a process of its own, under the same limits, while the program is in another (see
    ``judge``); standard input is empty then. ``stop``: when it is set, the program is killed. Raises SandboxError when
    the child does not get as far as the program.
    """
    limits = limits or Limits()
    try:
        folder = tempfile.mkdtemp(prefix="relax-sandbox-")
        try:
            return _run_in(folder, program, stdin, tests, limits, stop)
        finally:
            remove(folder)
    except OSError as error:
        raise SandboxError(f"sandbox: {error.strerror or error} {error.filename or ''}".rstrip()) from error


def _run_in(
    folder: str,
    program: str,
    stdin: bytes,
    tests: Sequence[Mapping[str, object]] | None,
    limits: Limits,
    stop: threading.Event | None,
) -> Outcome:
    of_program = Path(folder)
    if tests is not None:
        stdin = json.dumps(tests).encode()
        Path(folder, "judge").mkdir()
        of_program = Path(folder, "program")
        of_program.mkdir()
    (of_program / "program.py").write_text(program, encoding="utf-8", errors="replace")
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        status, said, report, reported = *pipes, None, None
        if tests is not None:
            pipes += os.pipe()
            report, reported = pipes[2:]
        child = _start(folder, limits, said, reported)
        for end in pipes[1::2]:
            pipes.remove(end)
            os.close(end)
        return Watch(child, folder, limits, stop).until_it_ends(stdin, status, report)
    finally:
        for end in pipes:
            os.close(end)


def _start(folder: str, limits: Limits, status: int, report: int | None) -> subprocess.Popen[bytes]:
    settings = {
        "limits": {
            "RLIMIT_CPU": math.ceil(limits.whole_seconds or limits.seconds) + 1,
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": limits.files,
            "RLIMIT_CORE": 0,
        },
        "folder": folder,
        "readable": _readable(),
        "status": status,
        "report": report,
        "parent": os.getpid(),
    }
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(_LAUNCHER), marshal.dumps(settings).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            pass_fds=(status,) if report is None else (status, report),
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"sandbox: Python cannot be started: {error.strerror or error}") from error


@cache
def _readable() -> list[str]:
    """What Python reads: its libraries and those of the system, time zones, the number of processors."""
    paths = sysconfig.get_paths()
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *paths.values(), str(Path(sys.executable).resolve().parent)}
    system = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    return sorted({*found, *system, "/etc/localtime", "/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo"})


@cache
def guarantees() -> frozenset[str]:
    """The layers that hold on this system: time, memory, parent, files, network, processes. Tried once.

    Raises SandboxError when no program can be run at all.
    """
    return frozenset(run("", limits=Limits(seconds=30.0)).guards)


def refuse_unsafe(what: str, instead: str) -> None:
    """Raises ConfigError where this system lacks a layer that is needed; ``instead`` says what to do then."""
    if missing := NEEDED - guarantees():
        raise ConfigError(
            f"{what}: this system cannot enforce {', '.join(sorted(missing))} (it takes Linux with seccomp on x86_64 "
            f"or aarch64, and Landlock); {instead}, or set allow_unsafe: true"
        )
