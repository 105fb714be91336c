"""Computing gradients, and moving weights to those who sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.interfaces.algorithm import Algorithm, Row
from relax_core.interfaces.component import Columns, Configurable
from relax_core.types import Version

if TYPE_CHECKING:
    import torch

    from relax_core.weights import WeightUpdate


TRAINER_COLUMNS = frozenset({"old_logprobs"})
"""Columns that the training step itself makes, at its start; stages make all others."""
VALUES = frozenset({"values"})
"""The output that a critic computes; the policy's model computes all others."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A micro-batch of the step's plan; ``last`` ends an optimizer update (the cut itself may be empty)."""

    rows: Sequence[Row]
    last: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """``moved``: of each update of the plan, whether it changed a weight; ``cuts``: row ids of each micro-batch, and
    ``last``."""

    metrics: Mapping[str, float]
    moved: Sequence[bool]
    cuts: Sequence[tuple[Sequence[str], bool]]

    @property
    def updates(self) -> int:
        return sum(self.moved)

    @property
    def skipped(self) -> int:
        """Updates with nothing left to train."""
        return len(self.moved) - self.updates


class Trainer(Configurable, ABC):
    """Computes gradients of one model, the policy or a critic. It does not know the algorithm beyond its loss.

    Which of the two its ``TrainerSetup`` says: ``Algorithm.loss`` is the policy's, ``Algorithm.value_loss`` a critic's,
    whose ``forward`` knows the output ``values`` alone. ``ActorCritic`` makes one trainer of both.

    Its ``Config`` may have a method ``unused(outputs)``: one line, which begins with the setting's path, for each
    setting that differs from its default and does nothing where the algorithm asks for these outputs.
    """

    @property
    @abstractmethod
    def budget(self) -> int:
        """Tokens of a micro-batch, at most, as ``cost`` counts them."""

    @abstractmethod
    def cost(self, rows: Sequence[Row]) -> int:
        """Tokens that a micro-batch of these rows computes, padding included."""

    @abstractmethod
    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """Per row the named outputs without gradient: float32 (T,), 0 where mask is 0; those with several numbers a
        token have a line for each sampled one, (sampled, K)."""

    @abstractmethod
    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        """One training step: accumulate every cut's gradient, update at each ``last``."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor); the tensors are the trainer's own and must be copied."""

    def frozen_names(self) -> frozenset[str]:
        """Names of the weights whose bits training cannot change: they travel to each receiver once."""
        return frozenset()

    async def sleep(self) -> None:
        """Free the accelerator for the engine: everything moves to main memory. ``save`` still works."""

    async def wake(self) -> None:
        """Back to the device, with the same bits."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Everything a bit-exact continuation needs."""

    @abstractmethod
    def load(self, folder: Path) -> None: ...


class Transport(Configurable, ABC):
    """Moves published weights from the trainer to engines: always a copy, never an alias."""

    @abstractmethod
    def publish(
        self, version: Version, weights: Iterable[tuple[str, torch.Tensor]], frozen: frozenset[str] = frozenset()
    ) -> WeightUpdate:
        """Copy the weights, with a manifest; the update is picklable and names where they are.

        ``frozen`` names tensors that training cannot change: they are published once, and each receiver reads them
        once. Should their bits change all the same, they are published anew. A receiver takes ``update.tensors()``.
        """

    def close(self) -> None:
        """Free what ``publish`` allocated."""
