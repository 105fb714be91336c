"""Which directories a run may take: none in which other settings came to anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.config import yaml
from relax_core.config.resolve import load
from relax_core.errors import ConfigError
from relax_core.launch import claim
from relax_core.metrics import MetricsLog
from relax_core.run import Run
from relax_core.testing.runs import run_file


def claimed(path: Path, *overrides: str) -> Run:
    config, stack = load(path, overrides)
    run = Run(config, config.runs / config.name, stack)
    claim(run)
    return run


def seed_of(run: Run) -> int:
    seed: int = yaml.read(run.directory / "config.yaml")["seed"]
    return seed


def test_a_directory_in_which_nothing_was_trained_takes_other_settings(tmp_path: Path) -> None:
    """A start that failed for a wrong setting leaves one."""
    path = run_file(tmp_path)
    run = claimed(path)
    for folder in ("checkpoints/.writing-00000002", "journal", "tensorboard"):
        (run.directory / folder).mkdir(parents=True)
    (run.directory / "metrics.jsonl").touch()
    assert seed_of(claimed(path, "seed=1")) == 1
    (run.directory / "config.yaml").write_text("versions: {core: relax-rl 0.0}\n")
    assert seed_of(claimed(path, "seed=2")) == 2


def a_checkpoint(directory: Path) -> None:
    (directory / "checkpoints/step-00000002").mkdir(parents=True)


def a_line_of_metrics(directory: Path) -> None:
    MetricsLog(directory).write(0, {"evaluation/held-out/accuracy": 0.5}, "eval")


def a_trained_step(directory: Path) -> None:
    (directory / "journal").mkdir()
    (directory / "journal/step-00000000.npz").touch()


@pytest.mark.parametrize("trace", [a_checkpoint, a_line_of_metrics, a_trained_step])
def test_one_with_results_does_not(tmp_path: Path, trace: Callable[[Path], None]) -> None:
    path = run_file(tmp_path)
    run = claimed(path)
    trace(run.directory)
    with pytest.raises(
        ConfigError, match=r"holds a run with other settings \(seed: 0 -> 1\): choose another name=\.\.\."
    ):
        claimed(path, "seed=1")
    assert seed_of(run) == 0
    claimed(path, "steps=9")  # more steps are no other run
    (run.directory / "config.yaml").write_text("versions: {core: relax-rl 0.0}\n")
    with pytest.raises(ConfigError, match=r"versions\.core: the run was made with relax-rl 0\.0"):
        claimed(path)


def test_fewer_steps_than_were_taken(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    a_checkpoint(claimed(path).directory)
    claimed(path, "steps=2")
    with pytest.raises(ConfigError, match=r"steps: found 1, but .* has taken 2: ask for more"):
        claimed(path, "steps=1")
