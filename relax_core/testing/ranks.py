"""Real ranks for tests: a program runs once, imports what it needs, and forks itself into processes that join.

run_ranks(Path(__file__), tmp_path, timeout=60)   # in a test: runs `python FILE tmp_path`

if __name__ == "__main__":                        # in the program
    fork_ranks(2, lambda rank: ...)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def run_ranks(program: Path, *arguments: object, timeout: float) -> None:
    """Run the program and all that it forks, for so many seconds at most. Raises AssertionError if it fails."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
    command = [sys.executable, str(program), *map(str, arguments)]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = process.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{program.name}: did not end within {timeout} s") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said[-6000:]


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two sets of tensors, as a part of the largest number."""
    assert one.keys() == other.keys()
    scale = max(float(t.abs().max()) for t in one.values())
    return max(float((t.float() - other[name].float()).abs().max()) for name, t in one.items()) / scale


def fork_ranks(size: int, act: Callable[[int], None]) -> None:
    """Call ``act`` with each rank in a process of its own; ends this process with 1 if one fails.

    Import what is heavy before, and compute nothing.
    """
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                act(rank)
                code = 0
            except BaseException:
                sys.stderr.write(f"rank {rank}: {traceback.format_exc()}")
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit(1)
