"""The zoom toy of relax-plugin-deepeyes on a cluster: tools run in processes of environments, and the policy learns."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_core.config.yaml import read
from relax_core.testing.runs import accounted, metrics, summary, train

ZOOM = Path(__file__).resolve().parents[2] / "relax_plugins" / "relax-plugin-deepeyes" / "zoom.yaml"
SHORT: dict[str, Any] = {"steps": 60, "checkpoint": {"every": 60}, "trajectories": {"every": 59}}
"""By then the policy has come from saying anything to answers and calls, but not yet to right ones."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_zoom_run_learns_under_ray(cluster: str, tmp_path: Path) -> None:
    raw = read(ZOOM) | {"plugins": ["omni", "deepeyes", "ray"], "runtime": {"id": "ray"}, "runs": str(tmp_path)} | SHORT
    raw["evaluation"][0]["size"] = 16
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    directory = train(path)

    steps = [line for line in metrics(directory) if line["kind"] == "train"]
    rewards = [line["reward"] for line in steps]
    assert statistics.fmean(rewards[-10:]) > statistics.fmean(rewards[:10]) + 0.05, rewards
    found = summary(directory)
    assert accounted(found["groups"]) and found["failed_plays"] == 0 and found["max_lag"] == 0
    assert any(line["environments/zoom/play/right_call"] for line in steps)

    lines = (directory / "trajectories" / "step-00000059.jsonl").read_text().splitlines()
    crops = [part for line in lines for part in shown(json.loads(line))]
    assert crops and all(any((directory / "trajectories" / "media").glob(f"{crop['hash']}.*")) for crop in crops)


def shown(play: dict[str, Any]) -> list[Any]:
    """The pictures that tools showed in a recorded play."""
    said = [message for turn in play["turns"] for message in turn["prompt"] or () if message["role"] == "tool"]
    parts = [part for message in said for result in message["parts"] for part in result["parts"]]
    return [part for part in parts if part["type"] == "image"]
