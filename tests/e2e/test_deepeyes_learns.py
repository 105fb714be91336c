"""The toys of relax-plugin-deepeyes are learned from random weights, by the command of its README and in its time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.testing.runs import accounted, metrics, summary

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("toy", "cpu_seconds"), [("zoom", 200), ("listen", 250), ("watch", 250)])
def test_a_policy_learns_to_look_closer_and_then_to_answer(tmp_path: Path, toy: str, cpu_seconds: int) -> None:
    """From chance to nearly always right on scenes that training never showed, and by the right call."""
    command = [sys.executable, "-m", "relax_core.cli", "train", f"relax_plugins/relax-plugin-deepeyes/{toy}.yaml"]
    done = subprocess.run(
        [*command, f"runs={tmp_path}", "name=run"], cwd=ROOT, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found, steps = summary(tmp_path / "run"), metrics(tmp_path / "run")
    held_out = found["evaluation"]["held-out"]
    assert held_out["accuracy"] > 0.95 and held_out["play/right_call"] > 0.9, held_out
    assert found["cpu_seconds"] <= cpu_seconds, found["cpu_seconds"]
    assert accounted(found["groups"]) and found["failed_plays"] == 0

    first = [line for line in steps if line["kind"] == "train"][:10]
    assert sum(line["reward"] for line in first) / 10 < 0.3, "it began at chance"
    assert sum(line[f"environments/{toy}/play/called"] for line in first) / 10 < 0.5
