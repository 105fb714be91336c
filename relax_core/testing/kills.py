"""Killing a process with SIGKILL at chosen moments, to see what it leaves on the disk.

Scripts are Python text. They find their own folder in the variable ``folder`` (a Path), and what they have safely done
they say with ``done(text)``.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
"""Audit events (PEP 578) before which a process is killed."""

DONE = "done.txt"


def killed_at_each_operation(setup: str, script: str, root: Path) -> list[Path]:
    """Run ``script`` in ``root/0``, ``root/1``, ..., killed before its first, second, ... file operation.

    ``setup`` runs once, before (imports). The last of the folders returned belongs to the run that was not killed.
    """
    _python("-m", __name__, script, str(root), setup)
    return [root / str(i) for i in range(len(list(root.iterdir())))]


def killed_after(script: str, folder: Path, seconds: float) -> list[str]:
    """Run ``script``, which must not end by itself, and kill it ``seconds`` after its first ``done``.

    Returns what it said it had done.
    """
    folder.mkdir(parents=True)
    child = subprocess.Popen([sys.executable, "-m", __name__, script, str(folder)])
    try:
        limit = time.monotonic() + 60
        while not said(folder):
            if child.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"the script ended or hung before its first done: exit code {child.poll()}")
            time.sleep(0.002)
        time.sleep(seconds)
        assert child.poll() is None, "the script ended by itself"
    finally:
        child.kill()
        child.wait()
    return said(folder)


def said(folder: Path) -> list[str]:
    """What the script in ``folder`` said it had done."""
    path = folder / DONE
    return path.read_text().splitlines() if path.exists() else []


def _python(*arguments: str) -> None:
    found = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stdout + found.stderr


def _run(script: str, folder: Path, names: dict[str, Any], victim: int | None = None) -> None:
    """Run the script here; with ``victim`` the process kills itself before that operation."""
    log = os.open(folder / DONE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    counter = itertools.count()

    def done(text: object) -> None:
        os.write(log, f"{text}\n".encode())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or (event == "open" and not str(arguments[0]).startswith(str(folder))):
            return  # what is opened elsewhere is an import
        if next(counter) == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    if victim is not None:
        sys.addaudithook(audit)
    exec(compile(script, "script", "exec"), {**names, "folder": folder, "done": done})


def _everywhere(script: str, root: Path, setup: str) -> None:
    """In forked children, so that the imports of ``setup`` are paid once."""
    names: dict[str, Any] = {}
    exec(compile(setup, "setup", "exec"), names)
    for victim in itertools.count():
        folder = root / str(victim)
        folder.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            try:
                _run(script, folder, names, victim)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    if sys.argv[3:]:
        _everywhere(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    else:
        _run(sys.argv[1], Path(sys.argv[2]), {})
