"""Watches a child until it ends: feeds and reads its pipes, holds the clock, and ends its whole process group."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import IO

from relax_envs.sandbox.folder import holds_more
from relax_envs.sandbox.limits import How, Limits, Outcome, SandboxError

_CHUNK = 65536
_LOOK = 0.1
"""Seconds between looks at what a program has made: threads, files."""
_START = 30.0
"""Seconds that Python may take to begin the program, however busy the machine is."""
_FAREWELL = 0.2
"""Seconds for a judge to end when it has said all, or has lost its program."""


class Watch:
    """One run of a child that was started in ``folder``."""

    def __init__(
        self, child: subprocess.Popen[bytes], folder: str, limits: Limits, stop: threading.Event | None
    ) -> None:
        self.child, self.folder, self.limits, self.stop = child, folder, limits, stop
        self._begun: float | None = None
        self._since: float | None = None
        self._reported = 0
        self._layers: list[str] = []
        self._program: int | None = None
        """The process of the program where the child is its judge."""

    def until_it_ends(self, stdin: bytes, status: int, report: int | None) -> Outcome:
        """``status``: the pipe on which it says that the program begins; ``report``: where a judge says its verdicts.

        Raises SandboxError when the program never begins.
        """
        streams = _Streams(self.child, stdin, status, report, self.limits.output_bytes)
        try:
            broken = self._broken(streams)
        finally:
            self._hear(streams)
            self._end(streams)
            streams.close()
        taken, code = streams.taken, self.child.returncode
        if not taken["status"]:
            raise SandboxError(_no_start(broken, bytes(taken["stderr"])))
        return Outcome(
            broken or how_it_ended(code, bytes(taken["stderr"])),
            code,
            bytes(taken["stdout"]),
            bytes(taken["stderr"]),
            tuple(json.loads(line) for line in bytes(taken["report"]).split(b"\n")[:-1]),
            time.monotonic() - (self._begun or time.monotonic()),
            tuple(self._layers),
        )

    def _hear(self, streams: _Streams) -> None:
        """Whether the program begins."""
        if self._begun is None and streams.taken["status"]:
            self._begun = time.monotonic()
            program, *self._layers = bytes(streams.taken["status"]).decode().split()
            self._program = int(program) or None

    def _end(self, streams: _Streams) -> None:
        """Kill the child's process group, and wait for the child: first the program, for a judge to be rid of it."""
        if streams.reported:
            self._farewell()
        if self._program is not None and not _has_ended(self.child):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._program, signal.SIGKILL)
            self._farewell()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def _farewell(self) -> None:
        """A moment in which the child may end by itself."""
        end = time.monotonic() + _FAREWELL
        while not _has_ended(self.child) and time.monotonic() < end:
            time.sleep(0.001)

    def _broken(self, streams: _Streams) -> How | None:
        """Serve the child until it ends: None; or has to be ended: which limit it broke."""
        start = look = time.monotonic()
        pause = 0.001
        while True:
            now = time.monotonic()
            self._hear(streams)
            end = self._end_of_time(start, len(streams.taken["report"]))
            if now >= end:
                return "timeout"
            if self.stop is not None and self.stop.is_set():
                return "killed"
            if now >= look + _LOOK:
                if self._has_made_too_much():
                    return "flood"
                look = now
            wait = min(end, look + _LOOK) - now
            if streams.reported:
                return None
            if streams.open:
                if streams.step(max(0.0, wait)):
                    return "flood"
            elif _has_ended(self.child):
                return None
            else:
                time.sleep(min(max(0.0, wait), pause))
                pause = min(2 * pause, 0.05)

    def _end_of_time(self, start: float, reported: int) -> float:
        """When it is too late; each verdict that is reported makes that later, up to the end of all."""
        if self._begun is None:
            return start + _START
        if self._reported != reported:
            self._reported, self._since = reported, time.monotonic()
        seconds, whole = self.limits.seconds, self.limits.whole_seconds
        return min((self._since or self._begun) + seconds, self._begun + (seconds if whole is None else whole))

    def _has_made_too_much(self) -> bool:
        if holds_more(self.folder, self.limits.folder_bytes, self.limits.entries):
            return True
        try:
            with open(f"/proc/{self._program or self.child.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # another system; or it has ended
            return False
        return int(fields[17]) > self.limits.threads


def _no_start(broken: How | None, stderr: bytes) -> str:
    said = " ".join(stderr.decode(errors="replace").split())[-300:]
    late = {"timeout": " in time", "killed": ": nobody waits for it any more"}.get(broken or "", "")
    return f"sandbox: the program could not begin{late}: {said or 'no reason given'}"


def how_it_ended(code: int, stderr: bytes) -> How:
    """By its exit code, and what it said last."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    if code == 0:
        return "ended"
    last = stderr[-2000:].rstrip().rpartition(b"\n")[2]
    if b"MemoryError" in last.partition(b":")[0]:
        return "memory"
    return "killed" if code < 0 else "failed"


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Without forgetting it: until then its number, and its group's, are nobody else's."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


class _Streams:
    """The child's pipes: what is to be written, and what was read, up to a bound."""

    def __init__(
        self, child: subprocess.Popen[bytes], stdin: bytes, status: int, report: int | None, limit: int
    ) -> None:
        assert child.stdin and child.stdout and child.stderr
        self.child, self.limit = child, limit
        self.taken = {name: bytearray() for name in ("stdout", "stderr", "status", "report")}
        self._rest = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        self.reported = False
        """Whether a judge has closed its report."""
        readers: list[tuple[int | IO[bytes], str]] = [
            (child.stdout, "stdout"),
            (child.stderr, "stderr"),
            (status, "status"),
        ]
        if report is not None:
            readers.append((report, "report"))
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
                self.reported |= key.data == "report"
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
