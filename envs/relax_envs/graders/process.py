"""One worker process, seen from the pool: starts it, sends it jobs, enforces their deadlines, kills it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

START = 60.0
"""Seconds for a process to start and to import what its functions need."""
BLOCK = 1 << 16
TAIL = 400
"""Characters of the standard error that are kept, to say why a process died."""


class WorkerProcess:
    """A running worker. Only one thread may use it, and that thread must live as long as it: where Linux ends a
    process with its parent, this means the thread that started it. ``kill`` may come from anywhere.
    """

    def __init__(self, functions: Sequence[str], memory: int | None) -> None:
        settings = json.dumps({"functions": list(functions), "parent": os.getpid(), "memory": memory})
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "relax_envs.graders.worker", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
            start_new_session=True,  # no Ctrl-C of the terminal, and one id for it and all its children
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = (
            pipe.fileno() for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        self._selector = selectors.DefaultSelector()
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        for fd in (self._out, self._err):
            self._selector.register(fd, selectors.EVENT_READ)
        self._received, self._complaints = b"", b""
        self.begun = False
        """Whether the process was at the first job without a reply when the last exchange ended."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> str | None:
        """Waits until it can take jobs; None, or why it never will."""
        replies: list[dict[str, Any]] = []
        problem = self.exchange([(b"", START)], replies.append)
        if problem == "deadline":
            return f"it was not ready within {START:g} s"
        return replies[0].get("raised") if replies else problem

    def exchange(self, jobs: Sequence[tuple[bytes, float]], receive: Callable[[dict[str, Any]], None]) -> str | None:
        """Sends lines, each with its seconds, and hands on each reply as it comes, in the same order.

        Returns None once all came, ``"last"`` if the process ended by itself after a reply, ``"deadline"`` if the first
        job without a reply overran its own, else why the process died. ``begun`` tells whether it was at that job.
        """
        outgoing, answered, self.begun = b"".join(line for line, _ in jobs), 0, False
        until = time.monotonic() + jobs[0][1]
        if outgoing:
            self._selector.register(self._in, selectors.EVENT_WRITE)
        try:
            while answered < len(jobs):
                events = self._selector.select(max(0.0, until - time.monotonic()))
                if not events and time.monotonic() >= until:
                    return "deadline"
                for key, _ in events:
                    if key.fd == self._in:
                        outgoing = self._send(outgoing)
                    elif key.fd == self._err:
                        self._listen()
                for reply in self._replies() if any(key.fd == self._out for key, _ in events) else ():
                    if reply is None:
                        return self._death()
                    if "began" in reply:
                        self.begun, until = True, time.monotonic() + jobs[answered][1]
                        continue
                    answered, self.begun = answered + 1, False
                    until = time.monotonic() + (jobs[answered][1] if answered < len(jobs) else 0)
                    receive(reply)
                    if reply.get("last"):
                        return "last"
        finally:
            if outgoing:
                self._selector.unregister(self._in)
        return None

    def kill(self) -> None:
        """Ends it and all its children at once."""
        if self._process.returncode is not None:  # waited for: its id may be another's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # where it had not become the head of its group yet

    def close(self) -> None:
        """``kill``, and gives back what the system holds for it. Only for the thread that uses it."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.forget()

    def forget(self) -> None:
        """Closes the pipes, and leaves the process alone."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, outgoing: bytes) -> bytes:
        try:
            outgoing = outgoing[os.write(self._in, outgoing[:BLOCK]) :]
        except BlockingIOError:
            return outgoing
        except OSError:  # it died; the end of its output says so, too
            outgoing = b""
        if not outgoing:
            self._selector.unregister(self._in)
        return outgoing

    def _replies(self) -> list[dict[str, Any] | None]:
        """What came; None at the end of the output, and instead of anything that is no reply."""
        try:
            block = os.read(self._out, BLOCK)
        except BlockingIOError:
            return []
        if not block:
            return [None]
        *lines, self._received = (self._received + block).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return [None]

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if block := os.read(self._err, BLOCK):
                self._complaints = (self._complaints + block)[-TAIL:]
            else:
                self._selector.unregister(self._err)

    def _death(self) -> str:
        with contextlib.suppress(KeyError, OSError):
            self._listen()
        self.kill()
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "its process cannot be ended"
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        words = " ".join(self._complaints.decode(errors="replace").split())
        return f"its process ended {how}" + (f", after: {words}" if words else "")


def _environment() -> dict[str, str]:
    """This process's, with its module path: functions of a user's own file are found, too."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**threads, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
