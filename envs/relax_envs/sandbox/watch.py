"""Watches a child until it ends: feeds and reads its pipes, holds the clock, and ends its whole process group."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from relax_envs.sandbox.folder import holds_more
from relax_envs.sandbox.limits import How, Limits, Outcome, SandboxError

_CHUNK = 65536
_LOOK = 0.1
"""Seconds between looks at what a program has made: threads, files."""
_START = 30.0
"""Seconds that Python may take to begin the program, however busy the machine is."""


class Watch:
    """One run of a child that was started in ``folder``."""

    def __init__(
        self, child: subprocess.Popen[bytes], folder: str, limits: Limits, stop: threading.Event | None
    ) -> None:
        self.child, self.folder, self.limits, self.stop = child, folder, limits, stop
        self._begun: float | None = None

    def until_it_ends(self, stdin: bytes, status: int, report: int) -> Outcome:
        """``status``: the pipe on which it says that the program begins. Raises SandboxError when it never does."""
        streams = _Streams(self.child, stdin, status, report, self.limits.output_bytes)
        try:
            broken = self._broken(streams)
        finally:
            _end(self.child)
            streams.close()
        taken, code = streams.taken, self.child.returncode
        if not taken["status"]:
            raise SandboxError(_no_start(broken, bytes(taken["stderr"])))
        return Outcome(
            broken or _how(code, taken["stderr"]),
            code,
            bytes(taken["stdout"]),
            bytes(taken["stderr"]),
            bytes(taken["report"]),
            time.monotonic() - (self._begun or time.monotonic()),
            tuple(json.loads(bytes(taken["status"]))),
        )

    def _broken(self, streams: _Streams) -> How | None:
        """Serve the child until it ends: None; or has to be ended: which limit it broke."""
        start = look = time.monotonic()
        pause = 0.001
        while True:
            now = time.monotonic()
            if self._begun is None and streams.taken["status"]:
                self._begun = now
            end = start + _START if self._begun is None else self._begun + self.limits.seconds
            if now >= end:
                return "timeout"
            if self.stop is not None and self.stop.is_set():
                return "killed"
            if now >= look + _LOOK:
                if self._has_made_too_much():
                    return "flood"
                look = now
            wait = min(end, look + _LOOK) - now
            if streams.open:
                if streams.step(max(0.0, wait)):
                    return "flood"
            elif _has_ended(self.child):
                return None
            else:
                time.sleep(min(max(0.0, wait), pause))
                pause = min(2 * pause, 0.05)

    def _has_made_too_much(self) -> bool:
        if holds_more(self.folder, self.limits.folder_bytes, self.limits.entries):
            return True
        try:
            with open(f"/proc/{self.child.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # another system; or it has ended
            return False
        return int(fields[17]) > self.limits.threads


def _no_start(broken: How | None, stderr: bytes) -> str:
    said = " ".join(stderr.decode(errors="replace").split())[-300:]
    late = {"timeout": " in time", "killed": ": nobody waits for it any more"}.get(broken or "", "")
    return f"sandbox: the program could not begin{late}: {said or 'no reason given'}"


def _how(code: int, stderr: bytearray) -> How:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    if code == 0:
        return "ended"
    last = bytes(stderr[-2000:]).rstrip().rpartition(b"\n")[2]
    if b"MemoryError" in last.partition(b":")[0]:
        return "memory"
    return "killed" if code < 0 else "failed"


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Without forgetting it: until then its number, and its group's, are nobody else's."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's process group, and wait for the child."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class _Streams:
    """The child's pipes: what is to be written, and what was read, up to a bound."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, status: int, report: int, limit: int) -> None:
        assert child.stdin and child.stdout and child.stderr
        self.child, self.limit = child, limit
        self.taken = {name: bytearray() for name in ("stdout", "stderr", "status", "report")}
        self._rest = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        readers: Sequence[tuple[int | IO[bytes], str]] = (
            (child.stdout, "stdout"),
            (child.stderr, "stderr"),
            (status, "status"),
            (report, "report"),
        )
        for file, name in readers:
            self._selector.register(file, selectors.EVENT_READ, name)
        os.set_blocking(child.stdin.fileno(), False)
        self._selector.register(child.stdin, selectors.EVENT_WRITE, "stdin")

    @property
    def open(self) -> bool:
        return bool(self._selector.get_map())

    def step(self, timeout: float) -> bool:
        """Read and write what is possible now; whether the child has said too much.

        All that is ready is read: what came first, that the program begins, may be listed last.
        """
        flooded = False
        for key, _ in self._selector.select(timeout):
            if key.data == "stdin":
                self._write()
                continue
            chunk = os.read(key.fd, _CHUNK)
            taken = self.taken[key.data]
            flooded |= len(taken) + len(chunk) > self.limit
            taken += chunk[: self.limit - len(taken)]
            if not chunk:
                self._selector.unregister(key.fileobj)
        return flooded

    def _write(self) -> None:
        assert self.child.stdin
        try:
            written = os.write(self.child.stdin.fileno(), self._rest[:_CHUNK]) if self._rest else 0
            self._rest = self._rest[written:]
        except BlockingIOError:
            return
        except OSError:  # it does not want to hear the rest
            self._rest = self._rest[:0]
        if not self._rest:
            self._selector.unregister(self.child.stdin)
            self.child.stdin.close()

    def close(self) -> None:
        self._selector.close()
        for file in (self.child.stdin, self.child.stdout, self.child.stderr):
            if file is not None and not file.closed:
                with suppress(OSError):
                    file.close()
