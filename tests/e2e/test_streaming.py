"""Training that begins before the step's rollout is complete gives what training after it gives, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.interfaces import Algorithm, Streaming
from relax_core.plugins import activate
from relax_core.testing.runs import metrics, run_file, train

EXTRA = ("algorithms-extra",)
FAST = ("grpo", "gspo")
SETTINGS: dict[str, dict[str, Any]] = {"dr-grpo": {"constant": 3}}


def streamed() -> list[Any]:
    """Ids of the algorithms that can be streamed with plain settings."""
    stack = activate(EXTRA)
    found = [id for id in stack.components("algorithms") if stack.load("algorithms", id).streaming != Streaming.BATCH]
    alone = [id for id in found if not stack.load("algorithms", id).needs and id != "opd"]
    return [id if id in FAST else pytest.param(id, marks=pytest.mark.slow) for id in alone]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("id", streamed())
def test_streaming_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id: str) -> None:
    settings: dict[str, Any] = {
        "plugins": list(EXTRA),
        "steps": 4,
        "algorithm": {"id": id, **SETTINGS.get(id, {})},
        "trainer": {"lr": 1e-2, "tokens_per_micro_batch": 64},
        "evaluation": [],
    }
    at_once = metrics(train(run_file(tmp_path / "streamed", **settings)))
    cls: type[Algorithm] = activate(EXTRA).load("algorithms", id)
    monkeypatch.setattr(cls, "streaming", Streaming.BATCH)
    waited = metrics(train(run_file(tmp_path / "waited", **settings)))
    assert max(line["train/cuts"] for line in at_once) > 1
    assert at_once == waited
