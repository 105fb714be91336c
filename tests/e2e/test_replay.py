"""``relax replay``: every past step comes out again to the last bit, and what was altered is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from relax_core.errors import CheckpointError
from relax_core.journal import Journal
from relax_core.replay import compare_values, main
from relax_core.testing.runs import run_file, train

SHORT = {"steps": 5, "groups_per_step": 3, "group_size": 4, "checkpoint": {"every": 2, "keep": 2}, "evaluation": []}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints after 4 and 5 steps are kept."""
    return train(run_file(tmp_path_factory.mktemp("run"), **SHORT))


@pytest.mark.parametrize("step", [0, 3, 4])
def test_a_step_comes_out_again(directory: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(directory, step) == 0
    text = capsys.readouterr().out
    for quantity in ("reward exact", "advantages", "loss", "grad_norm", "micro-batches"):
        assert quantity in text
    assert ("the initial weights" in text) == (step < 4)
    assert text.splitlines()[-1] == "everything is equal to the last bit"


def test_the_run_is_left_as_it_was(directory: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    assert main(directory, 1) == 0
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


@pytest.mark.parametrize(
    "settings",
    [
        {"updates_per_step": 4, "epochs": 2},
        {"updates_per_step": 2, "old": "engine"},
        {"max_staleness": 2},
        {"trainer": {"id": "torch", "lr": 1e-3, "tokens_per_micro_batch": 64}},
    ],
    ids=["several updates", "engine's old policy", "asynchronous", "small micro-batches"],
)
def test_runs_of_every_kind(tmp_path: Path, settings: dict[str, object]) -> None:
    found = train(run_file(tmp_path, **(SHORT | {"steps": 3} | settings)))
    assert main(found, 2) == 0


def test_altered_records_are_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(directory / "journal", 100)
    content = journal.path(1).read_bytes()
    entry = journal.read(1)
    first = next(row for row in entry.rows if row.columns["units"])
    first.columns["advantages"][:] += first.columns["mask"]
    first.columns["trajectory"].rewards["exact"] += 0.25
    journal.write(dataclasses.replace(entry, metrics={**entry.metrics, "loss": np.nextafter(entry.metrics["loss"], 1)}))
    try:
        assert main(directory, 1) == 1
        assert capsys.readouterr().out.splitlines()[-1] == "different: reward exact, advantages, loss"
        assert main(directory, 2) == 1  # it trains step 1 as recorded, with the wrong advantages
        text = capsys.readouterr().out
        assert "step 1, on the way, already comes out differently" in text
        assert "grad_norm" in text.splitlines()[-1]
    finally:
        journal.path(1).write_bytes(content)
    assert main(directory, 1) == 0


def test_a_missing_entry_is_an_error_in_one_line(directory: Path) -> None:
    journal = Journal(directory / "journal", 100)
    content = journal.path(1).read_bytes()
    journal.path(1).unlink()
    try:
        with pytest.raises(CheckpointError, match=r"no entry of step 1; .* step 2 .*keep_steps") as error:
            main(directory, 2)
    finally:
        journal.path(1).write_bytes(content)
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="no entry of step 7; the journal holds steps 0 to 4"):
        main(directory, 7)


@pytest.mark.parametrize(
    ("recorded", "recomputed", "equal"),
    [
        ([1.0, None], [1.0, None], True),
        ([float("nan")], [float("nan")], True),
        ([0.1 + 0.2], [0.3], False),
        ([0.0], [-0.0], False),
        ([None], [0.0], False),
        ([1.0], [1.0, 2.0], False),
        ([], [], True),
    ],
)
def test_equal_means_the_same_numbers(recorded: list[float], recomputed: list[float], equal: bool) -> None:
    assert compare_values("x", recorded, recomputed).equal is equal
