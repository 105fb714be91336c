"""What roles print: in the run's directory and on the terminal, whatever becomes of the role."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest


def script(source: str, *values: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with a hard limit."""
    call = [sys.executable, "-c", textwrap.dedent(source), *map(str, values)]
    return subprocess.run(call, capture_output=True, text=True, timeout=100)


PRINTING = """
import logging, os, signal, sys, time
from pathlib import Path
import ray
from relax_plugin_ray.logs import named, to_role_log

class Printing:
    def __init__(self, role, folder):
        to_role_log(role, Path(folder))
        print("it begins as", role)

    def work(self, end):
        logging.getLogger("some.library").warning("a warning of %s", end)
        print("an error of", end, file=sys.stderr)
        os.system(f"echo a child of {end}")
        for i in range(500):
            print("line", i, "of", end)
        os.write(1, f"the last words of {end}".encode())
        if end == "abort":
            os.abort()
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

def main(temp, folder, roles):
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=10**8, _temp_dir=temp,
             logging_level=logging.ERROR)
    made = [ray.remote(named(role)(Printing)).remote(role, folder) for role in roles]
    for actor, role in zip(made, roles):
        try:
            ray.get(actor.work.remote(role), timeout=60)
        except ray.exceptions.RayActorError as error:
            print(f"it died: {role}")  # in one piece: Ray's own thread prints beside it
    time.sleep(2)  # Ray's monitor of logs looks twice a second
    ray.shutdown()

main(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


@pytest.mark.slow
def test_what_roles_print_outlives_them(tmp_path: Path) -> None:
    roles = ("calm", "kill", "abort")
    short = tempfile.mkdtemp(prefix="rx-", dir="/tmp")  # Ray's sockets have short paths
    try:
        done = script(PRINTING, short, tmp_path, *roles)
    finally:
        shutil.rmtree(short, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    terminal = re.sub(r"\x1b\[\d+m", "", done.stdout + done.stderr)
    assert "it died: kill" in terminal and "it died: abort" in terminal
    for role in roles:
        lines = (tmp_path / "logs" / f"{role}.log").read_text().splitlines()
        wanted = [
            f"it begins as {role}",
            f"an error of {role}",
            f"WARNING some.library: a warning of {role}",
            f"a child of {role}",
            *(f"line {i} of {role}" for i in range(500)),
            f"the last words of {role}",
        ]
        assert [line for line in wanted if line not in lines] == []
        assert not any(line.startswith(":actor_name") for line in lines)
        for line in wanted:
            if line.startswith("line "):  # the terminal may leave some of many out, the file never
                continue
            assert re.search(rf"^\({role} pid=\d+\) {re.escape(line)}", terminal, flags=re.MULTILINE), line


def test_a_log_is_continued_and_one_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from relax_plugin_ray.logs import to_role_log
        to_role_log("bus", Path(sys.argv[1]))
        print("work")
    """
    for _ in range(2):
        assert script(program, tmp_path).returncode == 0
    deadline = time.monotonic() + 10
    log = tmp_path / "logs" / "bus.log"
    while log.read_text() != "work\nwork\n" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.read_text() == "work\nwork\n"
    (tmp_path / "file").write_text("")
    done = script(program, tmp_path / "file")
    assert done.returncode == 0 and "work\n" in done.stdout
    assert done.stderr.count("cannot be written on this node (Not a directory): what bus prints is only on the") == 1
