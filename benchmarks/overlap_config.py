"""Settings of the overlap benchmark's engine and trainer; apart from their code, so that they import no torch."""

from __future__ import annotations

from relax_core.torch.config import EngineConfig, TrainerConfig


class MeteredEngineConfig(EngineConfig):
    log: str
    """A file to which a line is added at each new version of the weights, and at the end."""


class MeteredTrainerConfig(TrainerConfig):
    log: str
    """A file to which a line is added after each step."""
    idle: bool = False
    """Take the steps and compute nothing: for a run in which the engine never waits for the trainer."""
