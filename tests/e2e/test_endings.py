"""How a run ends when something outside it ends it: the engine's process dies, or someone presses Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import psutil
import pytest

from relax_core.errors import EngineError
from relax_core.plugins import installed_plugins
from relax_core.testing.living import lives
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import metrics, run_file, summary, train

ASSASSIN = '''
"""Kills the engine's process once, after the third step."""
import multiprocessing
import os
import signal

from relax_core.hookspecs import Callback
from relax_core.interfaces import Component


class Assassin(Callback):
    """Kills the engine after the third step; in a run of more than six steps after every one."""

    def on_step_end(self, run, event):
        if event.step == 2 or run.config.steps > 6:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)


def relax_callbacks():
    return {"assassin": Component("assassin_plugin:Assassin")}
'''


@pytest.fixture
def assassin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[EntryPoint]:
    write_plugin(tmp_path / "plugins", "assassin", ASSASSIN)
    installed = installed_plugins()
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugins"))  # the engine's process imports it too
    return (*installed, *plugins_in(tmp_path / "plugins"))


@pytest.mark.timeout(180)
def test_a_dead_engine_is_started_again(assassin: Sequence[EntryPoint], tmp_path: Path) -> None:
    """It gets the newest weights, what it was asked is asked again, and the run is what it would have been."""
    changes = {"plugins": ["assassin"], "callbacks": [{"id": "assassin"}], "runtime": {"overlap": "process"}}
    directory = train(run_file(tmp_path, **changes), installed=assassin)
    assert metrics(directory) == metrics(train(run_file(tmp_path / "undisturbed")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_that_dies_again_and_again_ends_the_run(assassin: Sequence[EntryPoint], tmp_path: Path) -> None:
    changes = {"plugins": ["assassin"], "callbacks": [{"id": "assassin"}], "runtime": {"overlap": "process"}}
    path = run_file(tmp_path, steps=10, **changes)
    with pytest.raises(EngineError, match="none of 1 is left"):
        train(path, installed=assassin)
    assert not [c for c in psutil.Process().children() if lives(c.pid) and "relax" in c.name()]


@pytest.mark.timeout(120)
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    path = run_file(tmp_path, steps=2000, evaluation=[])
    command = [sys.executable, "-m", "relax_core.cli", "train", str(path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    limit = time.monotonic() + 60
    while not (lines.exists() and lines.read_text().count("\n") > 5):
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    said, errors = run.communicate(timeout=10)
    assert run.returncode == 130 and "Traceback" not in errors, errors
    assert "the same command goes on" in said, said
    steps = len(lines.read_text().splitlines()) + 2
    assert summary(train(path, [f"steps={steps}"]))["steps"] == steps
