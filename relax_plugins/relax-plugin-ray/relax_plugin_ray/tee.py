"""A process that copies what another prints, to a file and to where it went before. A script, without packages.

It outlives what it listens to, so nothing that was printed is lost when that is killed. ``logs.to_role_log`` starts it.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys

MARKS = (b":actor_name:", b":task_name:", b":job_id:")
"""Lines that begin so are Ray's own, not the role's."""
LONGEST = 1 << 16
"""Bytes of a line without an end after which it is written all the same."""


class Copy:
    """One stream: ``source`` to ``before`` as it comes, and to ``log`` in whole lines."""

    def __init__(self, source: int, before: int, log: int) -> None:
        self.source, self._before, self._log = source, before, log
        self._rest = b""

    def take(self) -> bool:
        """Copy what is there; False at the end of the stream."""
        data = os.read(self.source, LONGEST)
        if data:
            self._before = written(self._before, data)
        lines = (self._rest + data).splitlines(keepends=True)
        last = lines[-1] if lines else b""
        whole = not data or last.endswith(b"\n") or len(last) > LONGEST
        self._rest = b"" if whole or not lines else lines.pop()
        text = b"".join(line for line in lines if not line.startswith(MARKS))
        self._log = written(self._log, text if data or not text or text.endswith(b"\n") else text + b"\n")
        return bool(data)


def written(target: int, data: bytes) -> int:
    """The descriptor to go on with: -1 once nothing can be written to it any more (a full disk, a closed terminal)."""
    try:
        while target >= 0 and data:
            data = data[os.write(target, data) :]
    except OSError:
        return -1
    return target


def main(descriptors: list[int]) -> None:
    """``descriptors``: where to read output and errors, where these went before, and the log."""
    out, err, before_out, before_err, log = descriptors
    if os.fork():  # nobody's child: who started it does not wait for it, and does not take it along
        return
    os.setsid()
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    for standard in (0, 1, 2):
        os.close(standard)
    with selectors.DefaultSelector() as selector:
        for copy in (Copy(out, before_out, log), Copy(err, before_err, log)):
            selector.register(copy.source, selectors.EVENT_READ, copy)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.take():
                    selector.unregister(key.fd)


if __name__ == "__main__":
    main([int(value) for value in sys.argv[1:]])
