"""SIGKILL in the middle of what must not be torn: a checkpoint, a publication, an evaluation, a journal entry."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.testing.runs import accounted, in_child, metrics, run_file, summary, train

RUN = {
    "steps": 12,
    "checkpoint": {"every": 3},
    "evaluation": [{"name": "held-out", "environment": "last-word", "size": 16, "every": 4}],
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_call(owner: Any, name: str, count: int, after: bool = False) -> None:
    """Replace ``owner.name``: its ``count``-th call kills the process, before or after the real work."""
    real = getattr(owner, name)
    calls = 0

    def lethal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            die()
        result = real(*args, **kwargs)
        if calls == count:
            die()
        return result

    setattr(owner, name, lethal)


def in_a_checkpoint(count: int) -> None:
    """When the trainer's part is written and the bus's is not."""
    from relax_core.torch.trainer import TorchTrainer

    dies_at_call(TorchTrainer, "save", count, after=True)


def before_a_checkpoint_is_named(count: int) -> None:
    from relax_core.checkpoint import Checkpoints

    dies_at_call(Checkpoints, "_publish", count)


def while_weights_are_copied(count: int) -> None:
    """When the step is in the journal and no engine has its weights."""
    from relax_core.transports.snapshot import Flat

    dies_at_call(Flat, "_fill_blocks", count * 2)


def while_the_engine_loads(count: int) -> None:
    from relax_core.torch.engine import TorchEngine

    dies_at_call(TorchEngine, "_swap", count)


def in_an_evaluation(count: int) -> None:
    """When it has been played and its results are not recorded."""
    from relax_core import evaluate

    dies_at_call(evaluate, "summarize", count)


def in_a_journal_entry(count: int) -> None:
    from relax_core import atomic

    dies_at_call(atomic, "write_file", count * 7)


def between_journal_and_acknowledgement(count: int) -> None:
    from relax_core.journal import Journal

    dies_at_call(Journal, "write", count * 2, after=True)


MOMENTS: list[Callable[[int], None]] = [
    in_a_checkpoint,
    before_a_checkpoint_is_named,
    while_weights_are_copied,
    while_the_engine_loads,
    in_an_evaluation,
    in_a_journal_entry,
    between_journal_and_acknowledgement,
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(run_file(tmp_path_factory.mktemp("reference"), **RUN))


def killed_then_finished(path: Path, moment: Callable[[int], None], overrides: list[str]) -> Path:
    """Killed at the first, then (in the next start) at the second such moment; then to the end."""
    for count in (1, 2):

        def work(count: int = count) -> None:
            moment(count)
            train(path, overrides)

        assert in_child(work) == -signal.SIGKILL
    assert in_child(lambda: train(path, overrides)) == 0
    return path.parent / "runs" / "tiny"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_same_curve_comes_out(reference: Path, tmp_path: Path, moment: Callable[[int], None]) -> None:
    directory = killed_then_finished(run_file(tmp_path, **RUN), moment, [])
    assert metrics(directory) == metrics(reference)
    assert summary(directory)["groups"] == summary(reference)["groups"]
    assert summary(directory)["evaluation"] == summary(reference)["evaluation"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", [in_a_checkpoint, in_an_evaluation])
def test_the_account_holds_two_versions_behind(tmp_path: Path, moment: Callable[[int], None]) -> None:
    directory = killed_then_finished(run_file(tmp_path, **RUN), moment, ["max_staleness=2"])
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] == 48 and found["max_lag"] <= 2
