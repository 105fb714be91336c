"""How rewards become advantages, and these a loss.

Shape legend: B rows, T tokens of a window, K candidates of a token, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from relax_core.interfaces.component import Columns, Configurable
from relax_core.types import Task

if TYPE_CHECKING:
    import torch

    from relax_core.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a stage sees it: the columns that it needs."""

    id: str
    group: str
    columns: Columns

    @property
    def trajectory(self) -> str:
        """Equal for the rows of one trajectory: a row's id is ``<group>/<member>/<sample>``."""
        return f"{self.group}/{self.id.removeprefix(self.group).lstrip('/').partition('/')[0]}"

    @property
    def member(self) -> int:
        """Which member of its group it is of."""
        return int(self.id.rsplit("/", 2)[1])

    def having(self, columns: Columns) -> Row:
        """The row with more columns, or other values of some. What columns it has is neither copied nor read."""
        return Row(self.id, self.group, ChainMap(dict(columns), self.columns))  # type: ignore[arg-type]


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

    It holds whole trajectories, so that a loss may compute what belongs to all rows of one. ``mask_BT`` (bool) marks
    trained tokens. ``columns`` holds every other per-token column that was made, by name (``ref_logprobs``, ...), as
    (B, T), and columns with a line of K numbers for each sampled token as (B, T, K). Values under mask 0 mean nothing
    and may be NaN.
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
    sequence_B: torch.Tensor
    """int64: which trajectory of the batch each row is of, counted from 0."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the policy says of a batch, with gradient; None unless the algorithm's ``outputs`` names it."""

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor | None = None
    topk_logprobs_BTK: torch.Tensor | None = None
    """Of the token ids in the batch's column ``topk_ids``."""
    full_logprobs_BTV: torch.Tensor | None = None
    """Of every token of the vocabulary; that of a banned one is about -1e9."""


@dataclass(frozen=True, slots=True)
class Loss:
    """``total``: the weighted sum over the batch's tokens; the trainer divides by the update's global unit count.

    ``metrics``: name -> (sum, count) as detached scalars, averaged over the step. ``clipped_BT`` (bool): the tokens
    whose policy gradient was taken by clipping or rejection, or bounded; their share is logged, by modality too.
    """

    total: torch.Tensor
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    clipped_BT: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What the page of algorithms says of one."""

    formula: str
    """The advantage and the loss, as plain text."""
    papers: tuple[str, ...]
    """arXiv ids, or a DOI."""
    use: str
    """When to take it."""
    defaults: str
    """Its defaults and why they are what they are."""


class Algorithm(Configurable, ABC):
    """How rewards become advantages and these a loss. It owns no loop and knows no trainer."""

    about: ClassVar[About | None] = None
    needs: frozenset[str] = frozenset()
    """Columns it needs beyond the sampled ones and the reward: old_logprobs, ref_logprobs, values ...

    May be set on the instance: settings decide. So may ``outputs``, ``makes`` and ``streaming``.
    """
    outputs: frozenset[str] = frozenset({"logprobs"})
    """What must be computed per token: logprobs, entropy, topk_logprobs and full_logprobs of the policy, and values,
    which ask for a critic: a model of its own, trained beside the policy, perhaps in other processes."""
    makes: frozenset[str] = frozenset()
    """Per-token columns that ``advantages`` makes besides advantages, weight and units; the loss finds them in
    ``Batch.columns``."""
    streaming: Streaming = Streaming.SCALE

    @classmethod
    def notes(cls, config: Any, run: RunConfig) -> Iterable[str]:
        """What is worth knowing about these settings in ``run``, though they work; ``relax check`` prints it."""
        return ()

    @abstractmethod
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        """By row id: ``advantages`` (float32 (T,), 0 where mask is 0), ``weight`` and ``units`` (floats).

        And the columns of ``makes``. Rows of members whose reward is None get weight and units 0 and advantages 0: they
        are not trained.
        """

    def prepare(self, rows: Sequence[Row]) -> Mapping[str, Columns]:
        """Further per-token columns by row id, from all rows of the step and their ``old_logprobs``.

        Called once a step before its first update, if old log-probs were recomputed (name them in ``needs``). For what
        belongs to the whole step and no micro-batch can decide.
        """
        return {}

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        """What to report about scored groups: name -> (sum, count), averaged over the step."""
        return {}

    @abstractmethod
    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        """Of the policy. Where it is to stay as it is for a step, a total without gradient."""

    def value_loss(self, batch: Batch, values_BT: torch.Tensor) -> Loss:
        """Of the critic: needed where ``outputs`` has values.

        ``values_BT``: the critic's value of the state before each token, with gradient. Its metrics are reported beside
        those of ``loss``, under names of their own; ``clipped_BT`` is not used.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has values in its outputs, and no value_loss to learn them by"
        )
