"""What the processes of a role print: into the run's directory, and to the terminal under the role's name."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = "logs"
"""In the run's directory; a file for each process, named after its role."""


def to_role_log(role: str, directory: Path) -> None:
    """Copy all that this process prints to ``<directory>/logs/<role>.log``; it still goes where it went before.

    Call it first in an actor. Output and errors of Python, of C++ and of child processes are copied line by line, by a
    process that goes on when this one is killed; the file is appended to. Ray shows lines that are printed from now on
    under the role's name. Warnings of Python's ``logging`` are printed, with their logger's name. Where the file cannot
    be written this says so, once, and leaves everything as it is.
    """
    try:
        folder = directory / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / f"{role}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        line = f"logs: {directory / FOLDER} cannot be written on this node ({error.strerror}): what {role} prints is "
        print(f"{line}only on the terminal", file=sys.stderr, flush=True)
    else:
        _copy_to(log)
        os.close(log)
    for stream in (sys.stdout, sys.stderr):
        print(f":actor_name:{role}", file=stream, flush=True)  # by this Ray knows whose the lines after it are
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def _copy_to(log: int) -> None:
    """Put a pipe, and a process that reads it, between descriptors 1 and 2 and where they go."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pipes = [os.pipe(), os.pipe()]
    before = [os.dup(1), os.dup(2)]
    passed = [*(read for read, _ in pipes), *before, log]
    script = Path(__file__).with_name("tee.py")
    subprocess.run(
        [sys.executable, "-I", "-S", str(script), *map(str, passed)],
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ray kills the process group of an actor that died
        check=True,
    )
    for standard, (read, write) in zip((1, 2), pipes, strict=True):
        os.dup2(write, standard)
        os.close(read)
        os.close(write)
    for descriptor in before:
        os.close(descriptor)


def named(role: str) -> Callable[[type[T]], type[T]]:
    """Decorates an actor's class: its instances are called as the role, in Ray's messages and before what they print.

    ``ray.remote(named("engine-0")(EngineActor))``; a class that knows its role has a ``__repr__`` of its own instead.
    """

    def decorate(cls: type[T]) -> type[T]:
        return type(cls.__name__, (cls,), {"__repr__": lambda self: role, "__module__": cls.__module__})

    return decorate
