"""Whole runs on data with bad and long rows: skipped, counted, named, the same after a kill, and never too many."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax_core.checkpoint import Checkpoints
from relax_core.cli import main
from relax_core.testing.runs import accounted, in_child, metrics, run_file, summary, train

pytestmark = pytest.mark.timeout(120)

ROWS = 30
BAD = {2: "not JSON", 7: "<image>", 11: "truncated", 16: "no 'answer'", 23: "no such file"}
"""By line, counted from 1: what its reason says."""
LONG = (5, 20)


def write_rows(folder: Path) -> Path:
    """Text and pictures in turns, some rows bad in different ways, two with long prompts."""
    rng = np.random.default_rng(0)
    lines = []
    for n in range(1, ROWS + 1):
        file = folder / f"{n}.png"
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(file)
        row: dict[str, Any] = {"prompt": "what colour ?" + (" ?" * 30 if n in LONG else ""), "answer": "red"}
        if n % 2 or n in BAD:
            row |= {"prompt": "<image> " + row["prompt"], "images": [file.name]}
        if n == 7:
            row["images"] *= 2
        if n == 11:
            file.write_bytes(file.read_bytes()[:2000])
        if n == 16:
            del row["answer"]
        if n == 23:
            file.unlink()
        lines.append(json.dumps(row)[:-1] if n == 2 else json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def mixed_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "plugins": ["omni"],
        "model": {"id": "qwen3-omni", "tiny": {"words": ["what", "colour", "?", "red"], "hidden": 32}},
        "environments": [{"id": "single_turn", "name": "mixed", "data": str(write_rows(folder))}],
        "data": {"max_bad_fraction": 0.2, "max_prompt_tokens": 30, "long_prompts": "skip"},
        "rewards": [{"id": "exact"}],
        "evaluation": [],
        "steps": 12,
    }
    return run_file(folder, **(settings | changes))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed run: 48 groups from 23 good rows, so two epochs and a bit."""
    return train(mixed_run(tmp_path_factory.mktemp("mixed")))


def test_bad_rows_are_skipped_counted_and_named(reference: Path) -> None:
    found = summary(reference)
    assert found["bad_rows"] == {"mixed": len(BAD)}
    assert found["groups"]["trained"] == found["groups"]["issued"] == 48
    assert accounted(found["groups"]) and found["groups"]["failed"] == 0
    lines = [json.loads(line) for line in (reference / "bad_rows.jsonl").read_text().splitlines()]
    assert len(lines) == len(BAD)
    for number, reason in BAD.items():
        [line] = [
            line for line in lines if f"rows.jsonl:{number}: " in line["reason"] or f"/{number}.png" in line["reason"]
        ]
        assert reason in line["reason"] and line["environment"] == "mixed"
    counts = [line["data/bad_rows"] for line in metrics(reference)]
    assert counts == sorted(counts) and counts[-1] == len(BAD)


def test_long_prompts_are_left_out_and_counted(reference: Path) -> None:
    found = summary(reference)["long_prompts"]
    assert found["too_long"] in (2 * len(LONG), 2 * len(LONG) + 1, 2 * len(LONG) + 2)  # once an epoch each
    played = {json.loads(line)["task"]["id"] for line in trajectories(reference)}
    assert not {f"mixed/{n}#0" for n in (*BAD, *LONG)} & played
    assert {f"mixed/{n}#0" for n in range(1, ROWS + 1) if n not in (*BAD, *LONG)} <= played


def trajectories(directory: Path) -> list[str]:
    return [
        line for file in sorted((directory / "trajectories").glob("*.jsonl")) for line in file.read_text().splitlines()
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(reference: Path, workers: int, tmp_path: Path) -> None:
    data = {"max_bad_fraction": 0.2, "max_prompt_tokens": 30, "long_prompts": "skip", "workers": workers, "ahead": 9}
    assert metrics(train(mixed_run(tmp_path, data=data))) == metrics(reference)


@pytest.mark.parametrize("steps", [(4,), (2, 8)])
def test_killed_and_started_again_it_skips_the_same(reference: Path, steps: tuple[int, ...], tmp_path: Path) -> None:
    path = mixed_run(tmp_path)
    directory = tmp_path / "runs" / "tiny"
    for step in steps:
        written = partial(has_checkpoint, directory, step)
        assert in_child(partial(train, path), 0.0, written) == -signal.SIGKILL
    train(path)
    assert metrics(directory) == metrics(reference)
    assert summary(directory)["bad_rows"] == {"mixed": len(BAD)}
    assert (directory / "bad_rows.jsonl").read_text().count("\n") == len(BAD)


def has_checkpoint(directory: Path, step: int) -> bool:
    return step in Checkpoints(directory / "checkpoints", 3, readonly=True).steps()


def test_more_bad_rows_than_allowed_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixed_run(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", str(path), "data.max_bad_fraction=0.1"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "data.max_bad_fraction allows 0.1" in said and "environments.mixed" in said and said.count("error:") == 1


def test_evaluation_leaves_bad_rows_out_too(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    environment = {"id": "single_turn", "name": "mixed", "data": str(rows), "eval_data": str(rows)}
    evaluation = [{"name": "held-out", "environment": "mixed", "disjoint": False}]
    path = mixed_run(tmp_path, environments=[environment], evaluation=evaluation, steps=1)
    found = summary(train(path))
    assert found["bad_rows"]["mixed/eval"] == len(BAD)
    assert found["evaluation"]["held-out"]["items"] == ROWS - len(BAD) - len(LONG)
    assert found["evaluation"]["held-out"]["failed"] == 0


def test_check_names_bad_rows_and_shows_one_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", str(mixed_run(tmp_path))])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for number, reason in BAD.items():
        if reason != "truncated":  # is found by decoding
            assert any(f"rows.jsonl:{number}:" in line and reason in line for line in said.splitlines()), number
    assert "user: <image: 1.png>" in said and "what colour ?" in said
    with pytest.raises(SystemExit):
        main(["check", "--deep", str(mixed_run(tmp_path))])
    said = capsys.readouterr().out
    assert any("11.png" in line and "truncated" in line for line in said.splitlines())
