"""How rewards become advantages, and these a loss. Shape legend: B rows, T tokens of a window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from relax_core.interfaces.component import Columns, Configurable
from relax_core.types import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a stage sees it: the columns that it needs."""

    id: str
    group: str
    columns: Columns


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory of a group with its rows; ``reward`` None: it abstained and its rows are not trained."""

    reward: float | None
    rewards: Mapping[str, float | None]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scored trajectories of one task, as an algorithm sees them. Failed plays (no rows) are left out."""

    id: str
    task: Task
    members: Sequence[Member]


class Streaming(StrEnum):
    """How a loss is normalised, and so whether training may begin before the step's rollout is complete."""

    KNOWN = "known"
    """Counts are fixed by the plan."""
    SCALE = "scale"
    """Sum now, divide once before clipping."""
    BATCH = "batch"
    """Needs the whole step first (whitening over the step, ...)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as a loss sees it: each row's window from its first sampled token, left-aligned, width T.

    ``mask_BT`` (bool) marks trained tokens. ``columns`` holds every other per-token column a stage made, by name
    (``ref_logprobs``, ``values``, ...), as float (B, T). Values under mask 0 mean nothing and may be NaN.
    """

    step: int
    tokens_BT: torch.Tensor
    mask_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    """Of the engine that sampled (mu)."""
    old_logprobs_BT: torch.Tensor | None
    """Of the policy at the start of the step; None: it is the policy being trained (one update a step)."""
    advantages_BT: torch.Tensor
    weight_B: torch.Tensor
    """Multiplies a row's token losses under the chosen aggregation."""
    units_B: torch.Tensor
    """What the row adds to the aggregation's global count."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the trainer computed for a batch, with gradient; None unless the algorithm's ``outputs`` names it."""

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """``total``: the weighted sum over the batch's tokens; the trainer divides by the update's global unit count.

    ``metrics``: name -> (sum, count) as detached scalars, averaged over the step.
    """

    total: torch.Tensor
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Algorithm(Configurable, ABC):
    """How rewards become advantages and these a loss. It owns no loop and knows no trainer."""

    needs: frozenset[str] = frozenset()
    """Columns it needs beyond the sampled ones and the reward: old_logprobs, ref_logprobs, values ..."""
    outputs: frozenset[str] = frozenset({"logprobs"})
    """What the trainer must compute per token: logprobs, entropy, values ..."""
    streaming: Streaming = Streaming.SCALE

    @abstractmethod
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        """By row id: ``advantages`` (float32 (T,), 0 where mask is 0), ``weight`` and ``units`` (floats).

        Rows of members whose reward is None get weight and units 0 and advantages 0: they are not trained.
        """

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        """What to report about scored groups: name -> (sum, count), averaged over the step."""
        return {}

    @abstractmethod
    def loss(self, batch: Batch, outputs: Outputs) -> Loss: ...
