"""The probe of a run's engines, before anything is played: against the run's own trainer, wherever the two live.

First every engine gets blank weights, then the trainer's, each as a version of its own that nobody else ever sees: so
they are known to move, and what is sampled from them is known twice. Stages, hooks and metrics learn nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from relax_core.chat_state import advanced
from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Row
from relax_core.probe import FLOAT32, TOKENS, Probe, Reply, Tolerance, summary, tolerance_of
from relax_core.types import Encoded, Version

if TYPE_CHECKING:
    from relax_core.interfaces import Environment, ModelAdapter, Trainer
    from relax_core.run import Run
    from relax_core.runtime import Roles
    from relax_core.turns import Turns
    from relax_core.weights import WeightUpdate

TRIED = 4
"""Tasks of which the shortest prompt is taken."""


async def accept_engines(run: Run, roles: Roles, turns: Turns, lineage: int, first: int) -> str:
    """Probe every engine; a line for who watches. ``first``: the number of the publication that is played with.

    Raises ConfigError with a line for each difference; then nothing was played.
    """
    prompt = a_prompt(roles.adapter, roles.environments.values())
    sampling = run.config.sampling
    engines = roles.engine.replicas()
    names = [f"engine {i}" for i in range(len(engines))] if len(engines) > 1 else ["engine"]
    probes = [
        Probe(
            engine, roles.adapter, prompt, (sampling.temperature,), FLOAT32, name, min(TOKENS, sampling.max_new_tokens)
        )
        for engine, name in zip(engines, names, strict=True)
    ]
    truth = TrainerTruth(roles.trainer, sampling.temperature)
    try:
        blank = await _publish(roles, turns, Version(lineage, first - 2), blank=True)
        await asyncio.gather(*(_blank(probe, blank) for probe in probes))
        refuse(probes)
        update = await _publish(roles, turns, Version(lineage, first - 1))
        replies = await asyncio.gather(*(_asked(probe, update, "the trainer's weights") for probe in probes))
        await turns.to_trainer()
        for probe, some in zip(probes, replies, strict=True):
            probe.tolerance = engine_tolerance(run, update)
            await probe.compare(some, truth)
        refuse(probes)
    finally:
        roles.media.release([ref.key for ref in prompt.media])
    return summary(probes)


async def _publish(roles: Roles, turns: Turns, version: Version, blank: bool = False) -> WeightUpdate:
    """As ``System.publish`` does, but only engines will take it."""
    await turns.to_trainer()
    update = await roles.publish(version, blank)
    await turns.to_engine()
    return update


async def _asked(probe: Probe, update: WeightUpdate, weights: str) -> list[Reply]:
    return await probe.ask(update.manifest.version, weights) if await probe.load(update, weights) else []


async def _blank(probe: Probe, update: WeightUpdate) -> None:
    probe.compare_blank(await _asked(probe, update, "blank weights"))


def refuse(probes: Sequence[Probe]) -> None:
    """Raises ConfigError with every finding."""
    if lines := [f"engine probe: {line}" for probe in probes for line in probe.findings]:
        raise ConfigError(*lines)


def engine_tolerance(run: Run, update: WeightUpdate) -> Tolerance:
    """By what the engine's settings say of its dtype, and by that of the published weights."""
    import torch

    said = getattr(run.stack.config("engines", run.config.engine, "engine"), "dtype", "auto")
    published = {i.dtype for i in update.manifest.tensors if getattr(torch, i.dtype).is_floating_point}
    return tolerance_of(*published, *({said} - {"auto", None}))


def a_prompt(adapter: ModelAdapter, environments: Iterable[Environment]) -> Encoded:
    """The shortest prompt of some tasks, with its media retained; where none of them can be read, a token."""
    found: list[Encoded] = []
    with adapter.media.holding():
        for environment in environments:
            tasks = environment.tasks("train")
            for place in range(min(TRIED, len(tasks))):
                try:
                    found.append(adapter.encode(tasks[place].messages))
                except DataError:
                    continue  # counted and named where the run meets it
            if found:
                break
        never = {*adapter.banned_token_ids, *adapter.stop_ids}
        word = next(i for i in range(adapter.vocab_size) if i not in never)
        shortest = min(found, key=lambda e: len(e.ids), default=Encoded([word]))
        adapter.media.retain(ref.key for ref in shortest.media)
    return shortest


class TrainerTruth:
    """What the run's trainer computes, by the very call that gives the old policy's log-probs."""

    who = "the trainer"

    def __init__(self, trainer: Trainer, temperature: float) -> None:
        self.trainer, self.temperature = trainer, temperature

    async def __call__(
        self, prompt: Encoded, replies: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        rows = [_row(prompt, ids, member) for member, ids in enumerate(replies)]
        found = await self.trainer.forward(rows, frozenset({"logprobs"}))
        start = len(prompt.ids)
        return [[float(x) for x in columns["logprobs"][start:]] for columns in found]


def _row(prompt: Encoded, ids: Sequence[int], member: int) -> Row:
    """As the rollout makes one (see players.py), of a group that is on no bus."""
    import numpy as np

    past, new = len(prompt.ids), len(ids)
    columns = {
        "tokens": np.asarray([*prompt.ids, *ids], np.int32),
        "mask": np.asarray([0] * past + [1] * new, np.int8),
        "logprobs": np.zeros(past + new, np.float32),
        "versions": np.full(past + new, -1, np.int32),
        "positions": advanced(prompt.positions, new),
        "media": prompt.media,
    }
    return Row(f"engine-probe/{member}/0", "engine-probe", columns)
