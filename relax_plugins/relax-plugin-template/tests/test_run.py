"""The run file of this plugin can run."""

from __future__ import annotations

from pathlib import Path

from relax_core.testing.runs import accounted, summary, train

RUN = Path(__file__).resolve().parents[1] / "run.yaml"


def test_two_steps_of_the_run_file(tmp_path: Path) -> None:
    directory = train(RUN, ["steps=2", f"runs={tmp_path}"])
    found = summary(directory)
    assert found["steps"] == 2 and accounted(found["groups"])
