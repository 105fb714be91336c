"""What a program in the sandbox must not do, to others or to get out."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_envs.sandbox.limits import Limits
from relax_envs.sandbox.runner import guarantees, run

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guards are those of Linux"),
]

SHORT = Limits(seconds=0.3)
X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of its system calls")
CALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), 'refused')
"""


def needs(*layers: str) -> None:
    missing = set(layers) - guarantees()
    if missing:
        pytest.skip(f"this kernel does not offer {', '.join(sorted(missing))}")


# --- what it must not do ----------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of this machine on which somebody listens."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "text",
    [
        "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT', timeout=1)",
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/var/run/docker.sock')",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
        "import ctypes\nif ctypes.CDLL(None).syscall(41, 2, 1, 0) < 0: raise OSError('no socket')",
        "import ctypes\nif ctypes.CDLL(None).syscall(425, 8, 0) < 0: raise OSError('no ring')",
    ],
)
def test_no_network(text: str, listener: int) -> None:
    needs("network")
    found = run(text.replace("PORT", str(listener)), limits=Limits(seconds=5))
    assert found.how == "failed" and b"Error" in found.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing as m\nm.Process(target=print).start()",
        "import os; os.setsid()",
        "import os; os.setpgid(0, 0)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.killpg(os.getppid(), 0)",
        "import os; os.kill(-1, 0)",
        "import os, signal; os.pidfd_open(os.getppid())",
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) < 0: raise OSError('no ptrace')",
        "import resource; resource.prlimit(__import__('os').getppid(), resource.RLIMIT_NOFILE, (1, 1))",
        "import os; os.unshare(0)" if hasattr(os, "unshare") else "raise OSError",
    ],
)
def test_no_other_processes(text: str) -> None:
    needs("processes")
    found = run(text, limits=Limits(seconds=5))
    assert found.how == "failed" and b"Error" in found.stderr


def test_limits_can_be_read_and_not_be_raised() -> None:
    text = "import resource as r\nprint(r.getrlimit(r.RLIMIT_CPU)[0])\nr.setrlimit(r.RLIMIT_CPU, (1, 1))"
    found = run(text, limits=SHORT)
    assert found.stdout == b"2\n" and found.how == "failed"


@pytest.mark.parametrize(
    "text",
    [
        "open('OUTSIDE', 'w')",
        "import os; os.mkdir('OUTSIDE')",
        "import os; os.rename('program.py', 'OUTSIDE')",
        "import os; os.symlink('program.py', 'OUTSIDE')",
        "import os; os.remove('THERE')",
        "import os; os.truncate('THERE', 0)",
        "import os; os.chmod('THERE', 0)",
        "import os; os.utime('THERE')",
        "open('THERE').read()",
        "open('/etc/passwd').read()",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "import os; open('/proc/self/mem', 'r+b')",
        "import os; os.listdir('/')",
        "import os; os.symlink('THERE', 'link'); open('link').read()",
        "import os; os.chroot('.')",
    ],
)
def test_no_files_but_its_own(text: str, tmp_path: Path) -> None:
    needs("files", "processes")
    there, outside = tmp_path / "there.txt", tmp_path / "outside"
    there.write_text("secret")
    mode = there.stat()
    found = run(text.replace("THERE", str(there)).replace("OUTSIDE", str(outside)))
    assert found.how == "failed" and b"Error" in found.stderr and b"secret" not in found.stdout
    assert not outside.exists() and there.read_text() == "secret" and there.stat().st_mode == mode.st_mode


def test_files_of_its_own_are_bounded() -> None:
    found = run("open('big', 'wb').write(b'x' * 10**8)")
    assert found.how in ("failed", "killed")


def test_no_files_of_the_parent_are_open() -> None:
    with tempfile.TemporaryFile() as secret:
        secret.write(b"secret")
        secret.flush()
        os.set_inheritable(secret.fileno(), True)
        text = "import os\nfor fd in range(3, 64):\n try: print(fd, os.pread(fd, 9, 0))\n except OSError: pass"
        assert b"secret" not in run(text).stdout


@X86
@pytest.mark.parametrize(
    "text",
    [
        "call(41, 2, 1, 0)  # socket",
        "call(41, 1, 2, 0)  # socket, of the machine itself",
        "call(53, 1, 2, 0, (ctypes.c_int * 2)())  # a pair of datagram sockets, which can send to any name",
        "call(425, 8, 0)  # io_uring_setup",
        "call(56, 17, 0, 0, 0, 0)  # clone, a process",
        "call(58)  # vfork",
        "call(62, os.getppid(), 0)  # kill",
        "call(62, 0, 0)  # kill, the group",
        "call(200, os.getppid(), 0)  # tkill",
        "call(234, os.getppid(), os.getppid(), 0)  # tgkill",
        "call(310, os.getppid(), 0, 0, 0, 0, 0)  # process_vm_readv",
        "call(16, 1, 0x8901, ctypes.byref(ctypes.c_int(os.getppid())))  # FIOSETOWN",
        "call(72, 1, 8, os.getppid())  # F_SETOWN",
        "call(72, 1, 10, 9)  # F_SETSIG",
        "call(157, 1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG",
        "call(157, 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE",
        "call(203, os.getppid(), 8, ctypes.byref(ctypes.c_long(1)))  # sched_setaffinity",
        "call(31, 0, 0, 0)  # shmctl: remove a segment",
        "call(319, b'x', 0)  # memfd_create",
        "call(59, b'/bin/true', 0, 0)  # execve",
        "call(272, 0x10000000)  # unshare",
        "call(165, b'x', b'/', b'tmpfs', 0, 0)  # mount",
    ],
)
def test_no_system_call_around_the_library(text: str) -> None:
    needs("network", "processes")
    found = run(CALL + text, limits=Limits(seconds=5))
    assert found.how == "failed" and b"PermissionError: [Errno 1]" in found.stderr, found.stderr


@X86
@pytest.mark.parametrize("number", [0x40000000 + 41, 0x40000000 + 57])
def test_system_calls_of_another_kind_kill(number: int) -> None:
    needs("processes")
    assert run(CALL + f"call({number}, 2, 1, 0)").how == "killed"


def test_what_programs_need_is_allowed() -> None:
    text = """
import asyncio, os, resource, signal, subprocess, tempfile, threading
asyncio.run(asyncio.sleep(0))
print(resource.getrlimit(resource.RLIMIT_AS)[0] > 0, len(os.sched_getaffinity(0)) > 0)
signal.signal(signal.SIGUSR1, lambda *a: print('signal'))
os.kill(os.getpid(), signal.SIGUSR1)
with tempfile.NamedTemporaryFile('w') as file: print(file.name.startswith(os.getcwd()))
import sqlite3, decimal, random, hashlib, zoneinfo, uuid
print(random.SystemRandom().random() < 1, zoneinfo.ZoneInfo('UTC'))
"""
    found = run(text)
    assert found.stdout.split() == [b"True", b"True", b"signal", b"True", b"True", b"UTC"], found.stderr
