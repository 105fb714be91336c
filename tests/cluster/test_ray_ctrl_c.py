"""Ctrl-C ends a run on a cluster of its own within seconds, with all of its processes, and the run goes on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from relax_core.testing.living import lives
from relax_core.testing.runs import run_file, summary, train


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_ends_everything_within_ten_seconds(cluster: str, tmp_path: Path) -> None:
    path = run_file(tmp_path, plugins=["ray"], runtime={"id": "ray"}, steps=2000, evaluation=[])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    run = subprocess.Popen(
        [sys.executable, "-m", "relax_core.cli", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    lines = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    limit = time.monotonic() + 120
    while not (lines.exists() and lines.read_text().count("\n") > 5):
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    processes = psutil.Process(run.pid).children(recursive=True)
    assert len(processes) > 5
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    said, errors = run.communicate(timeout=10)
    assert run.returncode == 130 and "Traceback" not in errors, errors
    assert "the same command goes on" in said, said
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert gone and not [p for p in alive if lives(p.pid)], alive
    steps = len(lines.read_text().splitlines()) + 2
    assert summary(train(path, [f"steps={steps}"]))["steps"] == steps
