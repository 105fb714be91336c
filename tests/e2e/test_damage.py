"""A damaged checkpoint is found out: the one before it is used, with a message, and the curve stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.errors import CheckpointError, ConfigError
from relax_core.launch import prepare
from relax_core.screen import Screen
from relax_core.testing.runs import metrics, run_file, train
from relax_core.train import run_training

RUN = {"steps": 6, "checkpoint": {"every": 2, "keep": 3}, "evaluation": []}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(run_file(tmp_path_factory.mktemp("reference"), **RUN))


def resumed(path: Path) -> list[str]:
    """Train on; what was said."""
    run = prepare(path, report=lambda line: None)
    notes: list[str] = []
    with Screen(run, quiet=True) as screen:
        monkey = pytest.MonkeyPatch()
        monkey.setattr(screen, "note", notes.append)
        run_training(run, screen)
    return notes


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
@pytest.mark.parametrize("file", ["trainer/weights.safetensors", "bus.pkl", "state.json"])
def test_the_one_before_is_used(reference: Path, tmp_path: Path, damage: Callable[[Path], None], file: str) -> None:
    path = run_file(tmp_path, **RUN)
    directory = train(path, ["steps=4"])
    damage(directory / "checkpoints" / "step-00000004" / file)
    notes = resumed(path)
    assert any("step-00000004" in line and file in line for line in notes), notes
    assert any("step 2" in line for line in notes), notes
    # the learning rate is constant, so the longer run is the same as one that was never shorter
    assert metrics(directory) == metrics(reference)


def test_nothing_whole_is_left(tmp_path: Path) -> None:
    path = run_file(tmp_path, **RUN)
    directory = train(path, ["steps=2"])
    truncate(directory / "checkpoints" / "step-00000002" / "trainer" / "weights.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        train(path)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = run_file(tmp_path, **RUN)
    train(path, ["steps=2"])
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(seed: 0 -> 1\)"):
        train(path, ["seed=1"])


def test_a_complete_run_stays_as_it_is(reference: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, **RUN)
    directory = train(path)
    before = (directory / "metrics.jsonl").read_bytes()
    train(path)
    assert (directory / "metrics.jsonl").read_bytes() == before
