"""What a role gets besides its own settings when the runtime builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from relax_core.asking import Asker
    from relax_core.interfaces import ModelAdapter, Trainer
    from relax_core.media import MediaStore
    from relax_core.run import Run
    from relax_core.torch.ranks import Ranks
    from relax_core.types import LearnerName


def printed(line: str) -> None:
    """Where a note goes if nobody else takes it."""
    print(line, flush=True)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """For an engine. ``deterministic``: batches must not depend on timing (see ``Engine.enter``).

    ``directory``: the run's, for logs of processes that the engine starts; ``role``: how those of this one are called.
    ``note`` is told what is worth knowing about the engine, a line at a time; default: it is printed.
    """

    adapter: ModelAdapter
    seed: int
    deterministic: bool
    directory: Path | None = None
    role: str = "engine"
    note: Callable[[str], None] = printed


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """For a trainer: the run, for its settings and hooks, the model adapter, and what the algorithm asks for.

    ``ranks``: this process's place among those that train together; None: it trains alone. ``learner``: what it is to
    train; a critic only where ``outputs`` has values.
    """

    adapter: ModelAdapter
    run: Run
    outputs: frozenset[str] = frozenset({"logprobs"})
    ranks: Ranks | None = None
    learner: LearnerName = "policy"


@dataclass(frozen=True, slots=True)
class StageSetup:
    """For a stage: the run, the model adapter and the media of the process in which it works, and the columns that it
    is to make of those that it can.

    ``count``, ``exact`` and ``order``: how one that takes whole groups does best to claim them (see ``Stage``).
    ``trainer``: for the stages that ask the trainer itself; None where the stage has a process of its own.
    """

    run: Run
    adapter: ModelAdapter
    media: MediaStore
    columns: frozenset[str]
    count: int = 1
    exact: bool = False
    order: Literal["any", "started", "finished"] = "any"
    trainer: Trainer | None = None


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """For a reward that asks an engine, in the process in which it scores: the run, the reward's place (``rewards.0``)
    and name in the run file.

    ``policy``: asks the run's own engine, which serves the policy's newest weights; None for a reward that does not say
    that it asks it (``Reward.asks_policy``), and where there is no engine: in a play by hand. ``apart``: whether an
    engine of the reward's own belongs in a process of its own. ``note`` is told what happens to that.
    """

    run: Run
    where: str
    label: str
    policy: Asker | None
    apart: bool
    note: Callable[[str], None]
