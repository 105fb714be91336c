"""Conformance checks and helpers for authors of plugins. Importing this package imports neither torch nor numpy."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from relax_core.testing.algorithm_checks import check_algorithm
    from relax_core.testing.engine_checks import check_engine
    from relax_core.testing.environment_checks import check_environment
    from relax_core.testing.modality import check_modality
    from relax_core.testing.reward_checks import check_reward
    from relax_core.testing.scripted_plays import play

__all__ = [
    "BatchResult",
    "algorithm_batch",
    "check_algorithm",
    "check_engine",
    "check_environment",
    "check_modality",
    "check_reward",
    "play",
]

_HOMES = {
    "check_algorithm": "algorithm_checks",
    "check_engine": "engine_checks",
    "check_environment": "environment_checks",
    "check_modality": "modality",
    "check_reward": "reward_checks",
    "play": "scripted_plays",
}
"""What is imported when it is asked for: with it come settings, models and more."""


class BatchResult(TypedDict):
    """What ``algorithm_batch`` returns: plain data that ``json.dumps`` takes. Lists are in the order of the rows."""

    ids: list[Any]
    """The rows' ids; a row without one has its number, counted from 0."""
    advantages: list[list[float]]
    """A number for each token of each row; 0 where none is trained."""
    weight: list[float]
    """Of a row's token losses under the chosen aggregation; 0: not trained."""
    units: list[float]
    """What a row adds to the count by which the sum of weighted losses is divided."""
    loss: float
    gradient: list[list[float]]
    """Of the loss with respect to each log-prob of the policy being trained."""
    gradients: dict[str, list[Any]]
    """Likewise of everything that the loss is computed from: ``logprobs``, ``entropy``, ``values``, ..."""
    metrics: dict[str, float | None]
    """Means over the batch; None of nothing."""


def algorithm_batch(name: str, batch_file: Path | str | Mapping[str, Any], plugins: Iterable[str] = ()) -> BatchResult:
    """Run one algorithm on a batch given as JSON; its advantages, loss, gradients and metrics. See docs/cross-check.md.

    ``name``: the algorithm's id in a run file. ``batch_file``: a file, or what is in it as plain data. ``plugins``:
    active beside those that the batch names. The batch is one optimizer update in one micro-batch, in float32.
    Raises DataError for what is malformed in the batch, PluginError for an unknown id, ConfigError for wrong settings.
    """
    from relax_core.testing import json_batch

    return json_batch.run(name, batch_file, plugins)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
