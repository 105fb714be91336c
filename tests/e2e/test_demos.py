"""The shipped run files learn what their pages promise, within the CPU time and memory that they promise."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.testing.runs import accounted, metrics, summary

ROOT = Path(__file__).resolve().parents[2]
MODALITIES = ("text", "image", "audio", "video")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def relax_train(folder: Path, config: str, *overrides: str) -> Path:
    """``relax train`` as a user types it; the run's directory."""
    command = [sys.executable, "-m", "relax_core.cli", "train", str(ROOT / "configs" / config)]
    done = subprocess.run(
        [*command, f"runs={folder}", "name=run", *overrides], cwd=folder, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return folder / "run"


def accuracies(found: dict[str, Any]) -> dict[str, float]:
    return {name: values["accuracy"] for name, values in found["evaluation"].items()}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The summaries of the demo for seeds 0, 1 and 2."""
    folders = [tmp_path_factory.mktemp(f"seed-{seed}") for seed in range(3)]
    return [summary(relax_train(folder, "omni-tiny.yaml", f"seed={seed}")) for seed, folder in enumerate(folders)]


@pytest.mark.parametrize("modality", MODALITIES)
def test_the_demo_learns_every_modality(demos: list[dict[str, Any]], modality: str) -> None:
    found = [accuracies(demo)[modality] for demo in demos]
    assert statistics.fmean(found) > 0.9 and min(found) > 0.85, found


def test_the_demo_is_cheap(demos: list[dict[str, Any]]) -> None:
    assert max(demo["cpu_seconds"] for demo in demos) <= 150
    assert max(demo["peak_rss_mb"] for demo in demos) <= 1200


def test_the_demo_accounts_for_every_group(demos: list[dict[str, Any]]) -> None:
    for demo in demos:
        groups = demo["groups"]
        assert accounted(groups) and groups["trained"] == demo["steps"] * 32 and demo["max_lag"] == 0
        assert set(demo["evaluation"]) == set(MODALITIES)
        assert all(values["items"] == 256 for values in demo["evaluation"].values())


def test_the_demo_learns_two_versions_behind(tmp_path: Path) -> None:
    directory = relax_train(tmp_path, "omni-tiny.yaml", "max_staleness=2")
    found = summary(directory)
    assert all(value > 0.8 for value in accuracies(found).values()), accuracies(found)
    assert 0 < found["max_lag"] <= 2 and found["groups"]["evicted"] == 0 and accounted(found["groups"])
    assert any(line["lag/max"] > 0 for line in metrics(directory) if line["kind"] == "train")
    assert found["mean_length"]["trained"] == pytest.approx(found["mean_length"]["played"], rel=0.02)


def test_real_scanned_digits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "relax_envs.digits", str(tmp_path / "digits")], check=True, timeout=300)
    data = tmp_path / "digits"
    directory = relax_train(
        tmp_path,
        "digits.yaml",
        f"environments.digits.data={data / 'train.jsonl'}",
        f"environments.digits.eval_data={data / 'test.jsonl'}",
    )
    found = summary(directory)
    assert found["evaluation"]["held-out"]["items"] == 297
    assert found["evaluation"]["held-out"]["accuracy"] >= 0.9, found["evaluation"]
    assert found["cpu_seconds"] <= 180, found["cpu_seconds"]
