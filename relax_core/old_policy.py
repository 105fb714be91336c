"""The old policy: who computes log-probs of a step's rows under the policy at the start of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.interfaces import Algorithm

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import Columns, Row, Trainer
    from relax_core.types import Version
    from relax_core.weights import WeightUpdate


class OldPolicy(ABC):
    """A role of a run; idle where ``recomputes_old`` says that nobody asks it."""

    apart: bool
    """Whether it has weights of its own, so that it computes while the trainer moves; else the trainer waits for it."""

    @abstractmethod
    async def forward(self, rows: Sequence[Row], version: Version) -> list[Columns]:
        """``logprobs`` of each row: float32 (T,), 0 where mask is 0; as ``Trainer.forward`` gives them.

        ``version``: the policy at the start of the step. Raises RelaxError where the weights are of another one.
        """

    async def load_weights(self, update: WeightUpdate) -> None:
        """The trainer's weights of a new version; called for every one, the first included."""


class TrainerItself(OldPolicy):
    """Before its first update of a step the trainer is the old policy."""

    apart = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    async def forward(self, rows: Sequence[Row], version: Version) -> list[Columns]:
        return await self.trainer.forward(rows, frozenset({"logprobs"}))


def recomputes_old(run: RunConfig, algorithm: Algorithm) -> bool:
    """Whether the old policy's log-probs are computed for a step's rows.

    With one update a step the policy being trained is the old one; only an algorithm that names ``old_logprobs`` wants
    them all the same.
    """
    return run.old == "recompute" and (run.updates_per_step > 1 or "old_logprobs" in algorithm.needs)


def prepares(algorithm: Algorithm) -> bool:
    """Whether the algorithm makes columns of the whole step's old log-probs."""
    return type(algorithm).prepare is not Algorithm.prepare


async def with_old_policy(old: OldPolicy, rows: Sequence[Row], version: Version) -> list[Row]:
    """The rows with ``old_logprobs``."""
    found = await old.forward(rows, version)
    return [row.having({"old_logprobs": c["logprobs"]}) for row, c in zip(rows, found, strict=True)]


def prepared(algorithm: Algorithm, rows: Sequence[Row]) -> list[Row]:
    """All rows of a step, with what the algorithm prepares from their ``old_logprobs``."""
    columns = algorithm.prepare(rows)
    return [row.having(columns.get(row.id, {})) for row in rows]
