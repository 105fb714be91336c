"""Runs a command and ends with it, all of it: a script of the standard library.

    subprocess.Popen(guarded(command), stdin=subprocess.PIPE, start_new_session=True, ...)

All that the command started is killed when the command ends, when standard input ends (its other end is with the
process that wants the command: so the death of that one, of whatever kind, is noticed), and after SIGTERM; on Linux
also what left the process group or lost its parent. Ends with the command's exit code, or 128 + its signal; with 127
when it cannot be started. It must lead a session of its own.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

NO_START = 127
"""The exit code when the command cannot be started; standard error says why."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def guarded(command: "list[str]") -> "list[str]":
    """The command line of a guard that runs ``command``."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *command]


def main(command: "list[str]") -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whatever loses its parent becomes a child of this process
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,  # who kills its own group does not kill the guard
            preexec_fn=_die_with_guard,
        )
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        sys.exit(NO_START)
    signal.signal(signal.SIGTERM, lambda *_: child.kill())  # at once: its own way out may take long
    threading.Thread(target=_wait_for_end_of_input, args=(child,), daemon=True).start()
    code = child.wait()
    _kill_rest(child.pid)
    os._exit(128 - code if code < 0 else code)


def _wait_for_end_of_input(child: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1024):
        pass
    child.kill()


def _kill_rest(group: int) -> None:
    """Until nobody is left: one that is killed may just have started another."""
    if not os.path.isdir("/proc/self"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    while left := _descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants() -> "list[int]":
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        found += new
    return found


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux alone has it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1:])
