"""Rows, cuts and a trainer over the tiny model: for tests of trainers.

trainer = tiny_trainer(tokens_per_micro_batch=256)
rows = [row("g/0", prompt=[5, 6, 7], reply=[8, 9, 1], advantage=1.0), ...]
result = train(trainer, 0, [rows], algorithm)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.schema import RunConfig, SamplingSection
from relax_core.interfaces import Algorithm, Cut, ModelAdapter, Row, StepResult, Trainer
from relax_core.plugins import activate
from relax_core.run import Run
from relax_core.types import MediaRef

if TYPE_CHECKING:
    from relax_core.actor_critic import ActorCritic
    from relax_core.torch.trainer import TorchTrainer


def row(
    id: str,
    prompt: Sequence[int],
    reply: Sequence[int],
    mask: Sequence[int] | None = None,
    advantage: float = 1.0,
    weight: float = 1.0,
    units: float | None = None,
    media: Sequence[MediaRef] = (),
    **columns: Any,
) -> Row:
    """A row of the group that its id names up to the first slash. ``mask`` is of the reply; default: all sampled."""
    import numpy as np

    ids = np.array([*prompt, *reply], np.int32)
    sampled = np.array([0] * len(prompt) + list(mask or [1] * len(reply)), np.int8)
    own: dict[str, Any] = {
        "tokens": ids,
        "mask": sampled,
        "logprobs": np.where(sampled, -1.5, 0).astype(np.float32),
        "versions": np.where(sampled, 0, -1).astype(np.int32),
        "positions": None,
        "media": tuple(media),
        "advantages": np.where(sampled, advantage, 0).astype(np.float32),
        "weight": weight,
        "units": float(sampled.sum()) if units is None else units,
    }
    return Row(id, id.split("/")[0], {**own, **columns})


def tiny_config(algorithm: str = "none", **settings: Any) -> RunConfig:
    """A run file's own fields, whose components need not exist; ``settings`` are written as in a run file."""
    base: dict[str, Any] = {
        "name": "tiny",
        "steps": 10,
        "groups_per_step": 2,
        "model": {"id": "none"},
        "environments": ({"id": "none"},),
        "rewards": ({"id": "none"},),
        "algorithm": {"id": algorithm},
    }
    return RunConfig.model_validate(base | settings)


def tiny_run(directory: Path = Path("runs/tiny"), **settings: Any) -> Run:
    """A run without plugins; ``settings`` are fields of the run file."""
    return Run(tiny_config(**settings), directory, activate(()))


def tiny_trainer(
    adapter: ModelAdapter | None = None,
    temperature: float = 1.0,
    run: Run | None = None,
    outputs: frozenset[str] = frozenset({"logprobs"}),
    **settings: Any,
) -> TorchTrainer:
    """The embedded trainer on the CPU; ``settings`` are fields of its config; the learning rate moves the model.

    ``outputs``: what its algorithm will ask for; a critic is a trainer of its own (see ``tiny_actor_critic``).
    """
    from relax_core.setup import TrainerSetup
    from relax_core.testing.tiny import tiny_adapter
    from relax_core.torch.config import TrainerConfig
    from relax_core.torch.trainer import TorchTrainer

    run = run or tiny_run(sampling=SamplingSection(temperature=temperature))
    config = TrainerConfig(**{"lr": 1e-2, "device": "cpu", **settings})
    return TorchTrainer(config, TrainerSetup(adapter or tiny_adapter(), run, outputs))


def tiny_actor_critic(adapter: ModelAdapter | None = None, run: Run | None = None, **settings: Any) -> ActorCritic:
    """``tiny_trainer`` with a critic, whose learning rate moves it, too."""
    from relax_core.actor_critic import ActorCritic
    from relax_core.setup import TrainerSetup
    from relax_core.testing.tiny import tiny_adapter
    from relax_core.torch.config import TrainerConfig
    from relax_core.torch.trainer import TorchTrainer

    adapter, run = adapter or tiny_adapter(), run or tiny_run()
    config = TrainerConfig(**{"lr": 1e-2, "device": "cpu", "critic": {"lr": 1e-2}, **settings})
    outputs = frozenset({"logprobs", "values"})
    policy = TorchTrainer(config, TrainerSetup(adapter, run, outputs))
    return ActorCritic(policy, TorchTrainer(config, TrainerSetup(adapter, run, outputs, learner="critic")))


def train(trainer: Trainer, step: int, cuts: Iterable[Sequence[Row]], algorithm: Algorithm) -> StepResult:
    """One step of one update, in these micro-batches."""
    batches = list(cuts)
    return train_cuts(
        trainer, step, [Cut(rows, last=i == len(batches)) for i, rows in enumerate(batches, 1)], algorithm
    )


def train_cuts(trainer: Trainer, step: int, cuts: Iterable[Cut], algorithm: Algorithm) -> StepResult:
    """One step with any plan."""

    async def plan() -> AsyncIterator[Cut]:
        for cut in cuts:
            yield cut

    return asyncio.run(trainer.step(step, plan(), algorithm))


def forward(trainer: Trainer, rows: Sequence[Row], *outputs: str) -> list[Mapping[str, Any]]:
    """Columns of the rows without gradient."""
    return list(asyncio.run(trainer.forward(rows, frozenset(outputs or ("logprobs",)))))
