"""What a trainer trains, policy or critic, as the rest of the trainer sees it.

Legend: B rows, T window width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from relax_core.interfaces import Batch, Columns, Loss, Row
from relax_core.torch.forward import Forward
from relax_core.torch.layout import Piece
from relax_core.torch.learner import Learner
from relax_core.torch.pieces import Pieces
from relax_core.torch.step_state import StepState
from relax_core.types import LearnerName

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Made(Generic[T]):
    """What a model makes of a micro-batch, with gradient. ``anchor``: a part of it that leads to the parameters."""

    outputs: T
    anchor: Tensor
    tokens: int
    """That were computed."""


class Trainee(Protocol[T]):
    """A model, how it learns, and what it says of rows; ``T`` is what its loss sees."""

    name: ClassVar[LearnerName]
    prefix: ClassVar[str]
    """The beginning of the names of its metrics, of those that every trainee has."""
    outputs: ClassVar[frozenset[str]]
    """What it can be asked for."""
    compute: Forward
    learner: Learner
    pieces: Pieces

    def run(self, pieces: Sequence[Piece], batch: Batch, asked: frozenset[str]) -> AbstractContextManager[Made[T]]:
        """A micro-batch, for an algorithm that asks for these outputs. A backward pass belongs inside the block."""

    def idle(self) -> AbstractContextManager[Tensor]:
        """A pass over the least there is, where ranks run in step; gives the anchor."""

    def hooked(self, state: StepState, batch: Batch, outputs: T) -> T:
        """What the loss is to see."""

    def loss(self, state: StepState, batch: Batch, outputs: T) -> Loss:
        """Of the step's algorithm."""

    def note(self, state: StepState, rows: Sequence[Row], batch: Batch, outputs: T, loss: Loss) -> None:
        """Tally what a micro-batch tells."""

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """Without gradient, as ``Trainer.forward`` says; gives way to others after every micro-batch."""

    def forward_now(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """``forward`` at once."""
