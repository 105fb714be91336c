"""A synchronous run repeats bit for bit: again, in two processes, with or without evaluation, and killed."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relax_core.testing.runs import accounted, in_child, metrics, run_file, summary, train

SMALL: dict[str, Any] = {
    "steps": 12,
    "evaluation": [{"name": "held-out", "environment": "last-word", "size": 16, "every": 4}],
}

LONG: dict[str, Any] = SMALL | {"steps": 100, "checkpoint": {"every": 5}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run."""
    return train(run_file(tmp_path_factory.mktemp("reference"), **SMALL))


def test_two_runs_are_equal(reference: Path, tmp_path: Path) -> None:
    assert metrics(train(run_file(tmp_path, **SMALL))) == metrics(reference)


def test_another_seed_is_another_run(reference: Path, tmp_path: Path) -> None:
    assert metrics(train(run_file(tmp_path, **SMALL, seed=1))) != metrics(reference)


@pytest.mark.timeout(180)
def test_the_engine_in_its_own_process_samples_the_same(reference: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, **SMALL, runtime={"overlap": "process"})
    assert metrics(train(path)) == metrics(reference)


def test_evaluation_does_not_change_training(reference: Path, tmp_path: Path) -> None:
    without = metrics(train(run_file(tmp_path, **(SMALL | {"evaluation": []}))))
    assert without == [line for line in metrics(reference) if line["kind"] == "train"]


def has_another_size(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size != size


def killed_until_done(path: Path, overrides: list[str], seed: int, kills: int) -> Path:
    """Train with ``kills`` SIGKILLs at random moments, then to the end; the same command each time.

    Each part lives long enough to begin, so that what is killed is a run and not an import.
    """
    rng = random.Random(seed)
    directory = path.parent / "runs" / "tiny"
    lines = directory / "metrics.jsonl"
    for _ in range(kills):
        code = in_child(
            lambda: train(path, overrides),
            kill_when=partial(has_another_size, lines, lines.stat().st_size if lines.exists() else 0),
            kill_after_s=rng.uniform(0.0, 0.3),
        )
        if code == 0:
            raise AssertionError("the run ended before it could be killed: give it more steps")
        assert code == -signal.SIGKILL
    assert in_child(lambda: train(path, overrides)) == 0
    return directory


@pytest.mark.timeout(300)
def test_killed_at_random_and_started_again(tmp_path: Path) -> None:
    reference = train(run_file(tmp_path / "reference", **LONG))
    directory = killed_until_done(run_file(tmp_path, **LONG), [], seed=0, kills=5)
    assert metrics(directory) == metrics(reference)
    assert summary(directory)["groups"] == summary(reference)["groups"]


@pytest.mark.timeout(300)
def test_killed_while_asynchronous(tmp_path: Path) -> None:
    path = run_file(tmp_path, **LONG)
    directory = killed_until_done(path, ["max_staleness=2"], seed=1, kills=5)
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] == LONG["steps"] * 4
    assert found["max_lag"] <= 2 and found["groups"]["evicted"] == 0
    assert [line["step"] for line in metrics(directory) if line["kind"] == "train"] == list(range(1, LONG["steps"] + 1))


def test_killed_right_after_a_checkpoint_that_waited_for_an_evaluation(tmp_path: Path) -> None:
    """The next step's groups were played meanwhile: they are on the bus, and counted, when the run goes on."""
    run = SMALL | {"checkpoint": {"every": 4}}
    reference = train(run_file(tmp_path / "reference", **run))
    path = run_file(tmp_path, **run)

    def work() -> None:
        from relax_core.system import System

        real = System.save

        async def lethal(self: System, version: int) -> None:
            await real(self, version)
            os.kill(os.getpid(), signal.SIGKILL)

        System.save = lethal  # type: ignore[method-assign]
        train(path)

    assert in_child(work) == -signal.SIGKILL
    assert metrics(train(path)) == metrics(reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_at_twenty_random_moments(tmp_path: Path, staleness: int) -> None:
    run = LONG | {"steps": 600, "max_staleness": staleness}
    directory = killed_until_done(run_file(tmp_path, **run), [], seed=2, kills=20)
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] == 2400 and found["max_lag"] <= staleness
    if staleness == 0:
        assert metrics(directory) == metrics(train(run_file(tmp_path / "reference", **run)))
