"""``relax eval``: the newest checkpoint plays every set, and the run's files stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.evaluate import main
from relax_core.testing.runs import run_file, summary, train


def test_the_newest_checkpoint_is_evaluated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = train(run_file(tmp_path, steps=40))
    files = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    capsys.readouterr()
    assert main(directory) == 0
    said = capsys.readouterr().out
    accuracy = summary(directory)["evaluation"]["held-out"]["accuracy"]
    assert "going on from the checkpoint of step 40" in said and f"{accuracy:.3f}" in said
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == files


def test_without_a_checkpoint_it_says_whose_results_these_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run_file(tmp_path)) == 0
    assert "results of the initial weights" in capsys.readouterr().out
