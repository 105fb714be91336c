"""PPO with its critic as a whole run: the critic learns, warms up alone, and the run resumes and replays exactly."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from relax_core.replay import main as replay
from relax_core.system import System
from relax_core.testing.runs import in_child, metrics, run_file, train
from relax_core.transports import CopyTransport
from relax_core.types import Version
from relax_core.weights import WeightUpdate

STEPS, WARMUP = 12, 3
RUN: dict[str, Any] = {
    "steps": STEPS,
    "updates_per_step": 4,
    "algorithm": {"id": "ppo", "critic_warmup": WARMUP, "gamma": 0.99, "lam": 0.95},
    "rewards": [{"id": "exact", "weight": 0.2}, {"id": "format", "weight": 0.8, "words": 3}],
    "trainer": {"lr": 3e-3, "weight_decay": 0.1, "critic": {"lr": 3e-3}},
    "evaluation": [],
}
"""Replies of three words: the policy's are nearly so from the start, and the critic, which says 0, must find it out.

Weight decay moves all that is updated, though its gradient be 0.
"""


class Reference(NamedTuple):
    directory: Path
    published: dict[int, dict[str, Tensor]]
    """Copies of the weights by version."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return metrics(self.directory)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """An undisturbed run."""
    published: dict[int, dict[str, Tensor]] = {}

    def publish(
        self: CopyTransport, version: Version, weights: Iterable[tuple[str, Tensor]], frozen: frozenset[str]
    ) -> WeightUpdate:
        published[version.number] = {name: tensor.clone() for name, tensor in weights}
        return real(self, version, published[version.number].items(), frozen)

    real = CopyTransport.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyTransport, "publish", publish)
        directory = train(run_file(tmp_path_factory.mktemp("reference"), **RUN))
    return Reference(directory, published)


@pytest.mark.timeout(60)
def test_the_critic_learns(reference: Reference) -> None:
    """Its loss in the last quarter of the steps is below a quarter of that in the first."""
    losses = [line["train/value_loss"] for line in reference.lines]
    assert len(losses) == STEPS
    quarter = STEPS // 4
    assert statistics.fmean(losses[-quarter:]) < 0.25 * statistics.fmean(losses[:quarter])
    last = reference.lines[-1]
    assert last["train/value"] == pytest.approx(last["train/returns"], abs=0.2)


@pytest.mark.timeout(60)
def test_the_policy_stays_during_the_warm_up(reference: Reference) -> None:
    """The versions 0 to 3 are equal bit by bit, with the critic at work; the fourth step moves the policy."""
    first, *others = (reference.published[version] for version in range(WARMUP + 2))
    for weights in others[:WARMUP]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in first.items())
    assert not all(torch.equal(others[WARMUP][name], tensor) for name, tensor in first.items())
    warm, trained = reference.lines[:WARMUP], reference.lines[WARMUP:]
    assert all(line["train/grad_norm"] == 0 < line["train/critic_grad_norm"] for line in warm)
    assert all(line["train/grad_norm"] > 0 for line in trained)
    assert all(line["train/ratio"] == 1 for line in warm)
    assert (
        sum(line["train/clipped"] for line in trained)
        > 0
        < sum(line["train/value_clipped"] for line in reference.lines)
    )


@pytest.mark.timeout(120)
def test_killed_and_started_again(reference: Reference, tmp_path: Path) -> None:
    """Before version 3, in the last step of the warm-up, and before version 8: checkpoints are of versions 2 and 6."""
    path = run_file(tmp_path, **RUN)

    def killed_at(version: int) -> None:
        real = System._copied

        def lethal(self: System, number: int) -> Any:
            if number == version:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, number)

        System._copied = lethal  # type: ignore[method-assign]
        train(path)

    assert in_child(lambda: killed_at(3)) == -signal.SIGKILL
    assert in_child(lambda: killed_at(8)) == -signal.SIGKILL
    assert metrics(train(path)) == reference.lines


@pytest.mark.timeout(60)
def test_policy_and_critic_train_in_a_thread_beside_the_engines_process(reference: Reference, tmp_path: Path) -> None:
    runtime = {"id": "local", "overlap": "process"}
    assert metrics(train(run_file(tmp_path, runtime=runtime, **RUN))) == reference.lines


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step", [WARMUP - 1, WARMUP, STEPS - 1])
def test_a_step_comes_out_again(reference: Reference, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Within the warm-up, the first after it, and the last one, from the checkpoint before it."""
    assert replay(reference.directory, step) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "everything is equal to the last bit"
    assert all(quantity in text for quantity in ("advantages", "returns", "value_loss", "critic_grad_norm"))
