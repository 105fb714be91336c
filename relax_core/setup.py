"""What a role gets besides its own settings when the runtime builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_core.run import Run


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """For an engine. ``deterministic``: batches must not depend on timing (see ``Engine.enter``)."""

    adapter: ModelAdapter
    seed: int
    deterministic: bool


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """For a trainer: the run, for its settings and hooks, and the model adapter."""

    adapter: ModelAdapter
    run: Run
