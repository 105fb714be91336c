"""A tiny model learns through an agent program of its own, which knows nothing of Relax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.testing.runs import accounted, metrics, summary

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_agent_program_trains_the_policy(tmp_path: Path) -> None:
    """By the documented command: from chance, one word of ten, to more than 0.9."""
    command = [sys.executable, "-m", "relax_core.cli", "train", "configs/agent-tiny.yaml", f"runs={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    directory = tmp_path / "agent-tiny"
    rewards = [line["environments/agent/exact"] for line in metrics(directory) if line["kind"] == "train"]
    assert rewards[0] < 0.3 and sum(rewards[-3:]) / 3 > 0.9, rewards
    groups = summary(directory)["groups"]
    assert accounted(groups) and groups["failed"] == 0
    plays = [json.loads(line) for file in directory.glob("trajectories/*.jsonl") for line in file.open()]
    for play in plays:
        assert len(play["turns"]) == 1 and play["answer"] == play["turns"][0]["reply"]["parts"][0]["text"]
        (sample,) = play["samples"]
        assert sum(sample["mask"]) == sum(turn["tokens"] for turn in play["turns"])
