"""Which processes live. Any of them may end while it is looked at, and be a zombie or gone: that is no error here."""

from __future__ import annotations

import contextlib

import psutil


def living(mark: str, of: int | None = None) -> list[psutil.Process]:
    """Those that the process ``of`` (default: this one) started, or they did, with ``mark`` in their command line."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            if mark in " ".join(process.cmdline()):
                found.append(process)
    return found


def lives(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
