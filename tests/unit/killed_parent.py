"""For tests of the sandbox: whoever runs programs is killed, and none of their processes may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from relax_core.testing.living import lives, living
from relax_envs.sandbox.folder import remove


def check_nothing_is_left(code: str, processes: int) -> None:
    """Run ``code`` in another process until it has so many sandboxed ones, and kill it."""
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": tempfile.gettempdir()})
    limit = time.monotonic() + 20
    while len(children := living("launcher.py", of=parent.pid)) < processes:
        assert time.monotonic() < limit
        time.sleep(0.01)
    time.sleep(0.2)
    assert all(child.is_running() for child in children)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    psutil.wait_procs(children, timeout=5)
    assert not any(lives(child.pid) for child in children)
    for left in Path(tempfile.gettempdir()).iterdir():  # whoever is killed cannot clean up
        remove(str(left))
